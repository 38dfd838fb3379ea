"""The benchmark scripts run at their smallest settings: nothing else calls them, so nothing else would see them rot."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.forks import ROOT, Forks

THRESHOLDS = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "8388608")  # spares them a restart
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "BENCHMARK_START": "fork", **THRESHOLDS}
Output = Callable[..., str]
Ratio = Callable[[str, str], float]


def _command(script: str, *flags: str) -> list[str | Path]:
    return [ROOT / "benchmarks" / script, *flags, "--threads", "1"]


def _said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def ratio() -> Ratio:
    """ratio(script, what it printed): its bar in the picture of `make bench`."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import record
        import short
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return lambda name, out: short.FIGURES[name].ratio(record.joined(record.tables(out)))


@pytest.fixture
def output(forks: Forks) -> Output:
    """output(script, *flags, **environment): what it prints."""
    return lambda *words, **more: _said(forks.run(_command(*words), ENVIRONMENT | more))


@pytest.mark.slow
def test_train_step(output: Output) -> None:
    out = output("train_step.py", "--quick", "--contenders", "fnmodels", "--dtype", "float32")
    assert [line for line in out.splitlines() if line.startswith("| fnmodels |") and "MiB" in line], out


@pytest.mark.slow
def test_attention(output: Output) -> None:
    out = output("dev/attention.py", "--quick")
    for part in ("long: one row", "packed: 6 documents", "window: 512 keys", "\ncuda: "):
        assert part in out, out


@pytest.mark.slow
def test_encoders(output: Output, ratio: Ratio) -> None:
    out = output("encoders.py", "--quick")
    assert ratio("encoders", out) > 0
    assert out.count("\n| fnmodels |") == 5 and out.count(" x the others)") == 5, out
    assert out.count("\n| transformers |") == 3, out


@pytest.mark.slow
def test_per_sample(output: Output) -> None:
    names = ("fnmodels out=", "fnmodels fresh", "fnmodels batch", "transformers vmap(grad)")
    out = output("dev/per_sample.py", "--quick", "--contenders", *names)
    for name in names:
        assert f"\n{name} " in out, out
    for ours in names[:2]:  # both ratios, of wall and of CPU time
        assert len([line for line in out.splitlines() if f" {ours} " in line and "target" in line]) == 4, out


@pytest.mark.slow
def test_moe(output: Output, ratio: Ratio) -> None:
    out = output("moe.py", "--quick")
    assert ratio("moe", out) > 0
    assert out.count(": target 1.00 x grouped and 2.00 x eager\n") == 4, out
    assert out.count("\n| fnmodels |") == 4, out


@pytest.mark.slow
def test_nothing_chosen(output: Output) -> None:
    out = output("dev/nothing_chosen.py", "--quick")
    assert out.startswith("none: ") and out.count("| 100% |") == 3, out


@pytest.mark.slow
def test_logprobs(output: Output) -> None:
    out = output("dev/logprobs.py", "--quick")
    assert "\nforward, 256 tokens; largest difference" in out and "\nforward + backward, 128 tokens" in out, out
    assert out.count("(target 0.125), time ") == 2, out


@pytest.mark.slow
def test_optimizers(output: Output) -> None:
    out = output("dev/optimizers.py", "--quick")
    for name in ("torch fused", "in place", "pure", "master", "stochastic"):
        assert out.count(f"\n  {name} ") == 2, out
    assert out.count("(target 1.1)") == 2, out


@pytest.mark.slow
def test_curves(output: Output, tmp_path: Path) -> None:
    out = output("dev/curves.py", "--quick", "--out", str(tmp_path))
    assert "largest difference of the loss over 10 steps" in out and "\n| 10 | " in out, out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "| 10 | " in (tmp_path / "curves.md").read_text() and (tmp_path / "curves.json").exists()


@pytest.mark.slow
def test_save(output: Output) -> None:
    out = output("dev/save.py", "--size", "1", "--rounds", "1")
    for name in ("plain copy", "held up by a save in a thread", "save", "latest, which verifies", "load", "sha256"):
        assert f"\n| {name} |" in out, out


@pytest.mark.slow
def test_load(output: Output) -> None:
    names = ("fnmodels", "safetensors load_file")
    out = output("load.py", "--size", "1", "--rounds", "1", "--contenders", *names)
    assert all(f"\n| {name} |" in f"\n{out}" for name in names), out
    assert "owned: the result and one tensor" in out and "lazy: load_file, our checks and 50 ms" in out, out


@pytest.mark.slow
def test_parallel(output: Output, ratio: Ratio) -> None:
    out = output("parallel.py", "--quick", "--worlds", "2")
    assert ratio("parallel", out) > 0
    assert "losses: plain " in out, out
    for name in ("plain", "functional", "wrapper", "transformers FSDP2"):
        assert out.count(f"\n| {name} | ") == 1, out


@pytest.mark.slow
def test_profile_step(output: Output) -> None:
    out = output("dev/profile_step.py", "--quick")
    for part in (
        "the step",
        "layers",
        "attention",
        "norm, rotary, activation",
        "head and loss",
        "optimizer",
        "Python and dispatch",
    ):
        assert f"\n| {part} | " in out, out


@pytest.mark.slow
def test_a_second_start_finds_what_the_first_compiled(output: Output) -> None:
    out = output("dev/first_step.py", "--quick", "--contenders", "fnmodels block-compiled", "--dtype", "float32")
    first, second = (float(cell.removesuffix(" s")) for cell in out.splitlines()[-1].strip(" |").split(" | ")[1:])
    assert second < first / 2, out


@pytest.mark.slow
def test_data(output: Output) -> None:
    out = output("dev/data.py", "--quick", "--rounds", "1")
    for name in ("tokenize, our processes", "pack, documents", "pack, stream", "batches", "batches of a terabyte"):
        assert f"\n| {name} | " in out, out


@pytest.mark.slow
def test_gpu(forks: Forks) -> None:
    # traced: generating code for four small models takes most of a minute
    command = ["-m", "tests.support.traced", *_command("gpu.py", "--quick", "--device", "cpu")]
    out = _said(forks.run(command, ENVIRONMENT))
    ours = ("fnmodels", "fnmodels sdpa, compiled blocks", "fnmodels float8, compiled blocks")
    for name in (*ours, "modules", "modules, compiled layers", "transformers sdpa"):
        assert len([line for line in out.splitlines() if line.startswith(f"| {name} | ") and "%" in line]) == 1, out
    launches = ("\n| sdpa | none | ", "\n| sdpa | step | ")
    for part in ("\n  one product in float8 ", *launches, "\n  fnmodels, to the device "):
        assert part in out, out


@pytest.mark.slow
def test_gpu_decode(output: Output) -> None:
    out = output("dev/gpu_decode.py", "--quick", "--device", "cpu")
    assert out.count("\n| fnmodels |") == 2 and out.count("\n| transformers dynamic |") == 2, out


@pytest.mark.slow
def test_simulate(output: Output) -> None:
    out = output("dev/simulate.py", "--quick")
    assert "\n| fsdp=2 | " in out and out.endswith("x |\n"), out


@pytest.mark.slow
def test_loss_forms(output: Output) -> None:
    out = output("dev/loss_forms.py", "--quick")
    for name, times in {"partial": 2, "lambda": 2, "closure": 2, "own": 2, "transformers": 1}.items():
        assert out.count(f"\n| {name} | ") == times, out


@pytest.mark.slow
def test_load_parts(output: Output) -> None:
    out = output("dev/load_parts.py", "--quick")
    for name in ("rows", "rows, mapped", "tensor parallel", "whole", "get_slice"):
        assert f"\n| {name} | " in out, out
    assert "x the files in sum (target 1.1), met" in out, out


@pytest.mark.slow
def test_damaged(output: Output) -> None:
    out = output("dev/damaged.py", "--only", "files/weights that link", "--readers", "fnmodels", "transformers")
    rows = [line.split(" | ") for line in out.splitlines()[2:]]
    assert rows[0][:3] == ["| fnmodels", "2", "2"] and rows[1][1] == "2", out


@pytest.mark.slow
def test_recurrent(output: Output, ratio: Ratio) -> None:
    layers = ("gdn",)
    out = output("recurrent.py", "--quick", "--dtypes", "float32", "--layers", *layers)
    assert ratio("recurrent", out) > 0
    for layer in layers:
        assert len([line for line in out.splitlines() if line.startswith(f"| {layer} |")]) == 8, out
    step = output("recurrent_step.py", "--quick", "--dtypes", "float32")
    assert step.count("\n| float32 | ") == 2, step


@pytest.mark.slow
def test_recurrent_cp(output: Output) -> None:
    out = output("dev/recurrent_cp.py", "--quick")
    assert all(out.count(f"\n| {layer} | 64 | {world} | ") == 1 for layer in ("gdn", "ssd") for world in (1, 2, 4)), out


@pytest.mark.slow
def test_sparse(output: Output) -> None:
    out = output("sparse.py", "--quick")
    assert out.count(" | sparse | ") == 4 == out.count(" | dense | ") and out.count("indexer: scores") == 2, out
    assert out.count(" | sparse, windows of ") == 4 == out.count(" | dense, windows of "), out


@pytest.mark.slow
def test_generate(output: Output, ratio: Ratio) -> None:
    out = output("generate.py", "--quick")
    assert ratio("generate", out) > 0
    for who in ("fnmodels packed", "fnmodels int8", "fnmodels compiled int4", "transformers static"):
        assert out.count(f"| {who} |") == 2 + 2 * who.startswith("transformers"), out


@pytest.mark.slow
def test_invariant(output: Output) -> None:
    out = output("dev/invariant.py", "--quick")
    assert out.count("gradient of 2 rows of 16") == 2 and out.count("| step, B ") == 4, out


@pytest.mark.slow
def test_serve_and_grpo(output: Output) -> None:
    out = output("dev/serve.py", "--quick")
    assert out.count("| 1.000 |\n") == 5 and "\n| 1 | 8 | " in out, out
    out = output("dev/grpo.py", "--quick")
    assert "the rewards differ by 0.0000 at most" in out, out


@pytest.mark.slow
def test_server(output: Output) -> None:
    out = output("server.py", "--quick")  # which fails where an answer is wrong or anything is left
    for name in ("train.serve", "HTTP, at once", "HTTP, streamed"):
        assert f"\n  {name}: 100.0% of the answers" in f"\n{out}" and out.count(f"\n| {name} | ") == 1, out
    for kind in ("wait for answers", "read streams"):
        assert re.search(rf"\n\| {kind} \| \d+ \| 200, right: \d", out), out
    assert out.count(" | 413: ") == 1 and out.count(" | 400: ") == 2 and " 429: " in out, out


@pytest.mark.slow
def test_research(output: Output, ratio: Ratio) -> None:
    out = output("research.py", "--quick")
    assert ratio("research", out) > 0
    for section in (
        "cache",
        "all",
        "grid",
        "hvp",
        "kept",
        "lens",
        "harvest",
        "rows",
        "none",
        "none_gradient",
        "none_decode",
    ):
        assert f"\n| {section} | " in out, out


def test_programs_restart_themselves_to_give_memory_back(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in THRESHOLDS:  # which runs of other tests set for all that follows
        monkeypatch.delenv(name, raising=False)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\nfrom turns import give_back_memory\nprint('begun', flush=True)\ngive_back_memory()\n"
        f"print(sys.argv[1:], *(os.environ[name] for name in {list(THRESHOLDS)}))\n"
    )
    said = _said(forks.run([program, "--quick"], {"PYTHONPATH": str(ROOT / "benchmarks")}))
    assert said == "begun\nbegun\n['--quick'] 8388608 8388608\n"


@pytest.mark.slow
def test_small(output: Output, ratio: Ratio) -> None:
    out = output("small.py", "--quick")
    assert ratio("small", out) > 0
    assert out.count("\n| fnmodels | ") == 5 and out.count("| hand-written | ") == 5, out

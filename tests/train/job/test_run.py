"""Tests of the main job, called as a function, with a tiny model and text; the Ctrl-C test starts a process."""

import fcntl
import json
import math
import re
import signal
import threading
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tokenizers import Tokenizer

import params as P
from fnmodels.ops.cpu import product_table
from train.checkpoint import saved_steps
from train.cli import main
from train.command_line import terminal_text
from train.commands.sample import main as sample
from train.eval.command import main as evaluate
from train.job import recipe, run
from train.job.settings import Settings
from train.optim.schedules import warmup_stable_decay

TINY = Settings(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    row_length=32,
    batch_rows=4,
    steps=6,
    eval_every=3,
    eval_rows=4,
    sample_tokens=6,
)
SAME = ("model.safetensors", "config.json", "tokenizer.json", "metrics.jsonl", "summary.json")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200)))
    return path


def train(path, text, *flags, defaults=TINY):
    return main(["--run", str(path), *(["--data", str(text)] if text else []), *map(str, flags)], defaults=defaults)


def rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def same(one, other):
    """The names of files that differ between two runs, the last saved step's included."""
    last = Path("steps", max(path.name for path in (one / "steps").glob("step-*")))
    names = (*SAME, "fnmodels_manifest.json", last / saved_steps.STATE, last / saved_steps.PROGRESS)
    return [str(name) for name in names if (one / name).read_bytes() != (other / name).read_bytes()]


def saved(path):
    return saved_steps.steps(path / "steps")


def stop_after(monkeypatch, step):
    """Simulates a signal that arrives during `step`."""
    real = run.stop_requests

    @contextmanager
    def requests():
        steps = count(1)
        with real() as asked:
            yield lambda: next(steps) >= step or asked()

    monkeypatch.setattr(run, "stop_requests", requests)


def test_a_run_leaves_a_checkpoint_metrics_curves_and_a_summary(tmp_path, text, rendered, capsys):
    path = tmp_path / "run"
    assert train(path, text) == 0
    out = capsys.readouterr().out
    config, params = P.load_pretrained(path)
    assert {leaf.dtype for leaf in P.flatten(params).values()} == {torch.float32}
    assert config.tie_word_embeddings
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4, 5, 6]
    columns = {"loss", "lr", "grad_norm", "tokens", "finite", "perplexity", "bits_per_byte", "epochs"}
    assert columns <= rows(path)[0].keys()
    assert rows(path)[0]["perplexity"] == pytest.approx(math.exp(rows(path)[0]["loss"]), rel=1e-5)
    assert 3 < rows(path)[0]["bits_per_byte"] < 12
    assert rows(path)[5]["epochs"]["0"] == pytest.approx(6 * rows(path)[0]["epochs"]["0"], rel=1e-4)
    assert ("MFU: not computed" in out) is torch.cuda.is_available()
    (line,) = (line for line in out.splitlines() if line.startswith("settings: "))
    assert f"data {text}" in line and "optimizer" not in line and str(path / "settings.toml") in line
    assert [row["step"] for row in rows(path) if "heldout_loss" in row] == [3, 6]
    assert rows(path)[0]["lr"] > 0
    assert len({file.stat().st_mode for file in path.glob("*.safetensors")}) == 1
    assert (path / "loss.png").read_bytes().startswith(b"\x89PNG")
    charts = tags_of(path)
    assert {"loss/loss", "loss/bits_per_byte", "optimizer/lr", "data/epochs/0", "speed/peak_memory_gib"} <= charts[""]
    assert charts["heldout"] == {"loss/loss", "loss/bits_per_byte"} <= charts[""]  # two curves in each chart
    summary = json.loads((path / "summary.json").read_text())
    assert f"{summary['heldout_bits_per_byte']:.3f} bits per byte" in out
    assert "zlib -9" in out
    assert str(path / "loss.png") in out
    assert summary["sample"].startswith(" ".join(text.read_text().split()[:2]))


def tags_of(path):
    """{run that TensorBoard shows: the tags of its scalars}."""
    shown = {}
    for name in ("", "heldout"):
        events = EventAccumulator(str(path / "tensorboard" / name))
        events.Reload()
        shown[name] = set(events.Tags()["scalars"])
    return shown


def costs(path):
    return [json.loads(line) for line in (path / "speed.jsonl").read_text().splitlines()]


def test_the_cost_of_a_step_is_in_a_file_of_its_own_truncated_on_resume(tmp_path, text, monkeypatch, capsys):
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        assert train(path, text, "--peak-flops", "1e12") == 130
    flops = re.search(
        r"MFU: tokens per second x ([\d.]+) million FLOPs per token / 1e\+12 FLOP/s", capsys.readouterr().out
    )
    assert flops
    for cost in costs(path):
        assert cost["mfu"] == pytest.approx(cost["tokens_per_second"] * float(flops[1]) * 1e6 / 1e12, rel=0.1)
        assert cost["seconds"] > 0 and 1e7 < cost["peak_memory"] < 1e11
    with open(path / "speed.jsonl", "a") as file:  # a step after the last save, and one that was cut short
        file.write('{"step": 5, "seconds": 1.0}\n{"st')
    assert train(path, None, "--resume") == 0
    assert [cost["step"] for cost in costs(path)] == [1, 2, 3, 4, 5, 6]
    assert "mfu" in costs(path)[-1]  # the flag is the run's


def test_the_model_speaks_on_the_way_and_a_resumed_one_says_the_same(tmp_path, text, monkeypatch, capsys):
    flags = ("--sample-every", 2, "--sample-tokens", 5, "--prompt", "def f1")
    assert train(tmp_path / "whole", text, *flags) == 0
    out = capsys.readouterr().out
    said = [json.loads(line) for line in (tmp_path / "whole" / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in said] == [2, 4, 6]
    assert all(row["text"].startswith("def f1") and len(row["text"]) > 6 for row in said)
    assert f"step 4 says: {terminal_text(said[1]['text'])}" in out
    assert said[2]["text"] == json.loads((tmp_path / "whole" / "summary.json").read_text())["sample"]
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(tmp_path / "parts", text, *flags) == 130
    with open(tmp_path / "parts" / "samples.jsonl", "a") as file:
        file.write('{"step": 4, "text": "of a step that was not saved"}\n')
    assert train(tmp_path / "parts", None, "--resume") == 0
    assert (tmp_path / "parts" / "samples.jsonl").read_bytes() == (tmp_path / "whole" / "samples.jsonl").read_bytes()
    assert same(tmp_path / "whole", tmp_path / "parts") == []


@pytest.mark.parametrize(("steps", "stop", "seen"), [(9, 4, 4), (3, 2, 0)])
def test_a_profile_is_a_trace_of_as_many_steps_and_changes_nothing(
    tmp_path, text, monkeypatch, capsys, steps, stop, seen
):
    assert train(tmp_path / "plain", text) == 0
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        if stop:
            stop_after(patch, stop)
        assert train(path, text, "--profile", steps) == (130 if stop else 0)
    if seen:
        events = json.loads((path / "trace.json").read_text())["traceEvents"]
        # the fused update runs once a step, per kind of leaf: with decay and without
        assert sum(event.get("name") == "aten::_fused_adamw_" for event in events) == 2 * seen
    else:
        assert not (path / "trace.json").exists()
        assert "no trace: the run stopped before" in capsys.readouterr().out
    if stop:
        assert train(path, None, "--resume") == 0
    assert same(tmp_path / "plain", path) == []


def test_a_trace_that_a_full_disk_cuts_short_is_none(tmp_path, text, monkeypatch, capsys):
    def cut(profiler, name):
        Path(name).write_text('{"traceEvents": [{"na')  # torch prints what went wrong, and raises nothing

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", cut)
    path = tmp_path / "run"
    assert train(path, text, "--profile", 1) == 2
    assert "trace.json: The trace could not be written in full" in one_sentence(capsys)
    assert not (path / "trace.json").exists() and not list(path.glob(".writing-*"))


def test_what_a_model_says_moves_no_cursor():
    assert terminal_text("a\tb\n\x1b[2J\x0ec \u00e9\ufffd") == "a\tb\n\\x1b[2J\\x0ec \u00e9\ufffd"


RECIPES = {
    "muon": ((), {"layers.*_proj": 0.02, "*": 0.003}),
    "lion": (("--label-smoothing", 0.1, "--z-loss", "1e-4"), 0.0003),
    "sgd": (("--ema", 0.5, "--momentum", 0.8), 0.09),
    "adafactor": (("--weight-decay", 0), 0.03),
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_optimizer_learns_at_a_rate_of_its_own_and_resumes(tmp_path, text, monkeypatch, capsys, name):
    more, rate = RECIPES[name]
    flags = ("--optimizer", name, "--dtype", "float32", "--eval-rows", 99, *more)
    assert train(tmp_path / "whole", text, *flags) == 0
    output, logged = capsys.readouterr().out, rows(tmp_path / "whole")
    assert logged[0]["lr_of" if name == "muon" else "lr"] == pytest.approx(rate)
    assert logged[5]["loss"] < logged[0]["loss"] - 0.03
    learning = re.search(r"^learning_rate = (.*)$", (tmp_path / "whole" / "settings.toml").read_text(), re.MULTILINE)
    assert learning and len(learning[1]) < 7
    # with smoothed targets the loss is no cross entropy, of which a perplexity could be made; that of held-out text is
    assert ("perplexity" in logged[0]) == ("bits_per_byte" in logged[0]) == (name != "lion")
    assert logged[5]["heldout_bits_per_byte"] > 0
    assert ("by the average of the weights (--ema 0.5)" in output) == (name == "sgd")
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(tmp_path / "parts", text, *flags) == 130
    assert train(tmp_path / "parts", None, "--resume") == 0
    assert same(tmp_path / "whole", tmp_path / "parts") == []
    if name != "sgd":
        assert not (tmp_path / "whole" / "ema").exists()
        return
    for path in (tmp_path / "parts" / "ema").iterdir():
        assert path.read_bytes() == (tmp_path / "whole" / "ema" / path.name).read_bytes()
    # its checkpoint is as complete as the last weights', and what the held-out loss was of
    last = P.flatten(P.load_pretrained(tmp_path / "whole")[1])
    average = P.flatten(P.load_pretrained(tmp_path / "whole" / "ema")[1])
    assert any(not torch.equal(last[path], average[path]) for path in last)
    still = ("--dtype", "float32", "--eval-rows", 99, "--steps", 1, "--learning-rate", 0)
    found = []
    for at in ("", "ema"):
        assert train(tmp_path / f"again{at}", text, "--init", tmp_path / "whole" / at, *still) == 0
        found.append(rows(tmp_path / f"again{at}")[0]["heldout_loss"])
    assert found[1] == pytest.approx(logged[5]["heldout_loss"], rel=1e-6) and found[0] != pytest.approx(found[1])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--optimizer", "sgd", "--betas", "0.9,0.99"), "--betas (0.9, 0.99) is of another optimizer than --opt"),
        (("--muon-learning-rate", 0.1), "--muon-learning-rate 0.1 is of another optimizer than --optimizer adamw"),
        (("--optimizer", "muon", "--init", ".", "--lora", "r=2"), "--optimizer muon is for full matrices"),
    ],
)
def test_what_an_optimizer_does_not_have_is_refused(tmp_path, text, capsys, flags, words):
    assert train(tmp_path / "run", text, *flags) == 2
    assert words in one_sentence(capsys)


def test_accumulation_and_remat_change_no_curve_and_the_schedule_is_that_of_the_flags(tmp_path, text):
    flags = ("--dtype", "float32", "--eval-every", 4, "--decay-shape", "cosine", "--decay-floor", 0.5)
    assert train(tmp_path / "plain", text, *flags) == 0
    assert train(tmp_path / "parts", text, *flags, "--accumulate", 3, "--remat", "every:2") == 0
    plain, parts = rows(tmp_path / "plain"), rows(tmp_path / "parts")
    assert [row["step"] for row in plain if "heldout_loss" in row] == [4, 6]
    for one, other in zip(plain, parts, strict=True):
        assert all(other[name] == pytest.approx(one[name], rel=1e-4) for name in ("loss", "grad_norm"))
    shape = {"total": 6, "warmup": 0, "decay_ratio": 0.6, "shape": "cosine", "floor": 0.5}
    rates = [3e-3 * warmup_stable_decay(step, **shape) for step in range(1, 7)]
    assert [row["lr"] for row in plain] == pytest.approx(rates, rel=1e-5)
    assert rates[-1] > 1.5e-3


@pytest.mark.slow
@pytest.mark.parametrize("compile", ["whole", "step"])
def test_a_compiled_run_has_the_curve_of_a_plain_one(tmp_path, text, monkeypatch, compile):
    made, real = [], torch.compile
    # what Inductor makes of such graphs is tests/train/test_step.py's
    eager = lambda module, inputs, **options: module.forward  # noqa: E731
    monkeypatch.setattr(torch, "compile", lambda *a, **how: made.append(a) or real(*a, **how, backend=eager))
    assert train(tmp_path / "plain", text, "--dtype", "float32", "--steps", 2) == 0
    assert not made
    assert train(tmp_path / "run", text, "--dtype", "float32", "--steps", 2, "--compile", compile) == 0
    assert made
    for one, other in zip(rows(tmp_path / "plain"), rows(tmp_path / "run"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-4)


def test_without_a_compiler_nothing_is_compiled(tmp_path, text, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert train(tmp_path / "run", text, "--compile", "block") == 2
    assert "--compile block needs a C++ compiler" in one_sentence(capsys)


def test_a_step_as_one_graph_has_no_remat(tmp_path, text, capsys):
    assert train(tmp_path / "run", text, "--compile", "step", "--remat", "full") == 2
    assert "--compile step makes one graph" in one_sentence(capsys)


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not(tmp_path, text):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        assert train(tmp_path / name, text, "--steps", 3, "--seed", seed) == 0
    assert same(tmp_path / "a", tmp_path / "b") == []
    assert "model.safetensors" in same(tmp_path / "a", tmp_path / "c")


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_stopped_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, text, monkeypatch, capsys, stop):
    assert train(tmp_path / "whole", text) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, stop)
        assert train(tmp_path / "parts", text) == 130
    out = capsys.readouterr().out
    assert f"stopped at step {stop} of 6" in out
    assert f"fnmodels-train --run {tmp_path / 'parts'} --resume" in out
    assert len(rows(tmp_path / "parts")) == stop
    P.load_pretrained(tmp_path / "parts")
    assert train(tmp_path / "parts", None, "--resume") == 0
    assert f"resuming at step {stop} of 6" in capsys.readouterr().out
    assert same(tmp_path / "whole", tmp_path / "parts") == []


def test_text_of_which_no_row_can_be_held_out_is_refused_before_the_folder_is_a_runs(tmp_path, text, capsys):
    short = tmp_path / "short.txt"
    short.write_text(text.read_text()[:300])
    assert train(tmp_path / "run", short) == 2
    error = capsys.readouterr().err
    assert re.search(
        r"too little text in .*: of its 300 bytes \d+ are held out, which are \d+ tokens and not the 32", error
    )
    kilobytes = re.search(r"give about (\d+) kB or more\.$", error.strip())
    assert kilobytes
    short.write_text(text.read_text()[: 1000 * int(kilobytes[1])])
    assert train(tmp_path / "run", short) == 0


@pytest.mark.parametrize("instructions", ["avx512_bf16", "amx_bf16", "avx512_f"])
@pytest.mark.parametrize("widens", [False, True])
def test_fast_dtype_is_bf16_where_products_in_it_are_faster(instructions, widens, monkeypatch):
    """Widens: as with ONEDNN_MAX_CPU_ISA=AVX2, whatever instructions the CPU has."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {instructions: True})
    monkeypatch.setattr(product_table, "WIDENS", widens)
    assert recipe.fast_dtype() == ("bfloat16" if "bf16" in instructions and not widens else "float32")


def test_a_run_keeps_the_dtype_it_began_with_on_another_machine(tmp_path, text, monkeypatch):
    monkeypatch.setattr(recipe, "fast_dtype", lambda: "float32")
    assert train(tmp_path / "whole", text) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert train(tmp_path / "parts", text) == 130
    monkeypatch.setattr(recipe, "fast_dtype", lambda: "bfloat16")
    assert train(tmp_path / "parts", text, "--resume") == 0
    assert same(tmp_path / "whole", tmp_path / "parts") == []


def test_after_a_kill_rows_past_the_checkpoint_are_cut(tmp_path, text, monkeypatch):
    assert train(tmp_path / "whole", text) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        train(tmp_path / "killed", text)
    with open(tmp_path / "killed" / "metrics.jsonl", "a") as file:  # steps made after the last save, the last cut short
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    assert train(tmp_path / "killed", text, "--resume") == 0
    assert same(tmp_path / "whole", tmp_path / "killed") == []


class Killed(BaseException):
    """No `except` of the job swallows it. (tests/train/job/test_kills.py kills real processes.)"""


@pytest.mark.parametrize(
    ("of", "name", "call", "left"),
    [(saved_steps, "save", 2, [2]), (P, "save_pretrained", 2, [2, 4]), (P, "save_pretrained", 3, [4, 6])],
    ids=["before the step", "between step and checkpoint", "at the end, between the two"],
)
def test_a_kill_while_saving_leaves_what_can_be_resumed(tmp_path, text, monkeypatch, of, name, call, left):
    assert train(tmp_path / "whole", text) == 0
    real, calls = getattr(of, name), []

    def die(*args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise Killed
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(of, name, die)
        with pytest.raises(Killed):
            train(tmp_path / "killed", text, "--save-every", 2)
    assert saved(tmp_path / "killed") == left
    P.load_pretrained(tmp_path / "killed")
    assert train(tmp_path / "killed", text, "--resume") == 0
    assert same(tmp_path / "whole", tmp_path / "killed") == []
    P.verify(tmp_path / "killed")


def test_a_full_disk_ends_the_run_in_a_sentence_and_resuming_goes_on(tmp_path, text, monkeypatch, capsys):
    assert train(tmp_path / "whole", text) == 0
    real, calls = saved_steps.write_tensors, []

    def full(path, tensors):
        calls.append(path)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        real(path, tensors)

    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(saved_steps, "write_tensors", full)
        assert train(tmp_path / "full", text, "--save-every", 2) == 2
    assert one_sentence(capsys) == (
        f"python -m train: {tmp_path / 'full' / 'steps'}: Step 4 was not saved (No space left on device); "
        "step 2 and what is before it is as it was.\n"
    )
    assert saved(tmp_path / "full") == [2]
    assert train(tmp_path / "full", text, "--resume") == 0
    assert same(tmp_path / "whole", tmp_path / "full") == []


@pytest.mark.parametrize(("flags", "left"), [((), [5, 6]), (("--keep", 1), [6]), (("--keep", 9), [1, 2, 3, 4, 5, 6])])
def test_the_newest_steps_stay(tmp_path, text, flags, left):
    assert train(tmp_path / "run", text, "--save-every", 1, *flags) == 0
    assert saved(tmp_path / "run") == left


@pytest.mark.parametrize("left", [b"", b'{"settings": {"seed": 7}}', None])
def test_resuming_needs_no_file_that_is_not_verified(tmp_path, text, monkeypatch, left):
    """The saved step holds the settings, and hashes with which tokenizer.json and config.json are compared."""
    assert train(tmp_path / "whole", text) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(tmp_path / "run", text) == 130
    path = tmp_path / "run"
    for name in ("model.safetensors", "fnmodels_manifest.json"):
        (path / name).unlink()
    (path / "run.json").write_bytes(left) if left is not None else (path / "run.json").unlink()
    code = train(path, None, "--resume")
    if left is None:  # and a folder without it may be anybody's
        assert code == 2
    else:
        assert code == 0 and same(tmp_path / "whole", path) == []


@pytest.mark.parametrize("name", [saved_steps.STATE, saved_steps.PROGRESS, "fnmodels_manifest.json"])
def test_a_damaged_step_is_passed_over_and_set_aside(tmp_path, text, monkeypatch, capsys, name):
    assert train(tmp_path / "whole", text) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        assert train(tmp_path / "run", text, "--save-every", 2) == 130
    file = tmp_path / "run" / "steps" / "step-00000004" / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    capsys.readouterr()
    assert train(tmp_path / "run", text, "--resume") == 0
    captured = capsys.readouterr()
    assert "resuming at step 2 of 6" in captured.out
    assert "step-00000004 is damaged and passed over" in captured.err and captured.err.count("\n") == 1
    assert (tmp_path / "run" / "steps" / "aside-0-step-00000004").is_dir()
    assert same(tmp_path / "whole", tmp_path / "run") == []


def test_resume_of_a_finished_run_tells_its_result_again_without_reading_the_text(tmp_path, text, capsys):
    assert train(tmp_path / "run", text, "--steps", 2) == 0
    first = capsys.readouterr().out
    before = (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns
    text.unlink()
    assert train(tmp_path / "run", None, "--resume") == 0
    assert first.splitlines()[-6:] == capsys.readouterr().out.splitlines()[-6:]
    assert (tmp_path / "run" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("prepare", ["torchrun", "empty", "no state", "damaged state"])
def test_resume_without_a_complete_checkpoint_says_so_and_starts_at_0(tmp_path, text, monkeypatch, capsys, prepare):
    path = tmp_path / "run"
    if prepare == "torchrun":  # which repeats the command where the folder may be there or not
        assert train(path, text, "--steps", 2, "--resume") == 2 and not path.exists()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    if prepare == "empty":
        path.mkdir()
    elif prepare != "torchrun":
        assert train(path, text, "--steps", 2) == 0
        state = path / "steps" / "step-00000002" / saved_steps.STATE
        state.write_bytes(state.read_bytes()[:200]) if prepare == "damaged state" else state.unlink()
    assert train(path, text, "--steps", 2, "--resume") == 0
    assert "no complete checkpoint" in capsys.readouterr().out
    assert [row["step"] for row in rows(path)] == [1, 2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--steps", 7), "it was 6; leave it out, or continue training in another --run with --init {path}."),
        (("--seed", 1), "--seed 1 differs from the run"),
        (("--data", "elsewhere"), "differs from the run"),
        (("--init", "elsewhere"), "it was not given"),
        (("--learning-rate", 1), "--learning-rate 1.0 differs from the run in {path}: it was 0.003"),
    ],
)
def test_resume_refuses_flags_that_contradict_the_run(tmp_path, text, monkeypatch, capsys, flags, message):
    stop_after(monkeypatch, 2)
    train(tmp_path / "run", text)
    assert train(tmp_path / "run", None, "--resume", *flags) == 2
    assert message.format(path=tmp_path / "run") in one_sentence(capsys)


def test_a_finished_run_is_prolonged_with_the_schedule_of_the_longer_run(tmp_path, text, capsys):
    path = tmp_path / "run"
    assert train(path, text, "--steps", 3) == 0 and train(tmp_path / "long", text, "--steps", 5) == 0
    before = rows(path)
    capsys.readouterr()
    assert train(path, None, "--resume", "--steps", 2) == 2 and "it was 3" in one_sentence(capsys)
    assert train(path, None, "--resume", "--steps", 5) == 0
    out = capsys.readouterr().out
    assert "prolonged from 3 to 5 steps: from here on its rates are those of a run of 5 steps" in out
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4, 5] and rows(path)[:3] == before
    assert [row["lr"] for row in rows(path)[3:]] == [row["lr"] for row in rows(tmp_path / "long")[3:]]
    assert train(path, None, "--resume") == 0 and "the run is finished: 5 steps" in capsys.readouterr().out


def test_settings_of_a_file_give_the_run_of_the_same_flags_and_flags_win(tmp_path, text, capsys):
    assert train(tmp_path / "flags", text, "--learning-rate", 0.01, "--betas", "0.8,0.9", "--steps", 3) == 0
    out = capsys.readouterr().out
    written = (tmp_path / "flags" / "settings.toml").read_text()
    for line in ("steps = 3", "learning_rate = 0.01", "betas = [0.8, 0.9]", "# init =", f'data = "{text}"'):
        assert f"\n{line}\n" in f"\n{written}"
    assert f"settings: data {text}, steps 3, learning_rate 0.01, betas 0.8,0.9 (all: " in out
    file = tmp_path / "own.toml"
    file.write_text(f'data = "{text.name}"\nlearning_rate = 0.01\nbetas = [0.8, 0.9]\nsteps = 5\n')
    assert train(tmp_path / "file", None, "--config", file, "--steps", 3) == 0
    again = tmp_path / "flags" / "settings.toml"
    assert train(tmp_path / "again", None, "--config", again, defaults=Settings()) == 0
    for other in ("file", "again"):
        assert same(tmp_path / "flags", tmp_path / other) == []


def test_a_resumed_run_has_its_own_settings_whatever_the_defaults_are(tmp_path, text, monkeypatch, capsys):
    assert train(tmp_path / "whole", text) == 0
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        assert train(tmp_path / "parts", text, "--save-every", 1, "--keep", 3) == 130
    other = replace(TINY, weight_decay=0.5, steps=3, keep=1)
    file = tmp_path / "own.toml"
    file.write_text("steps = 7\n")
    capsys.readouterr()
    assert train(tmp_path / "parts", None, "--resume", "--config", file, defaults=other) == 2
    assert f"steps = 7 in {file} differs from the run in {tmp_path / 'parts'}: it was 6" in one_sentence(capsys)
    assert train(tmp_path / "parts", None, "--resume", defaults=other) == 0
    assert same(tmp_path / "whole", tmp_path / "parts") == []
    assert saved(tmp_path / "parts") == [4, 5, 6]  # --save-every and --keep are the run's as well
    (tmp_path / "parts" / "settings.toml").write_text("keep = 0\n")
    assert train(tmp_path / "parts", None, "--resume") == 2
    assert "settings.toml: keep is 0, which is not a whole number from 1" in one_sentence(capsys)


@pytest.mark.parametrize("change", ["text", "tokenizer", "config"])
def test_resume_refuses_when_what_the_run_began_with_has_changed(tmp_path, text, monkeypatch, capsys, change):
    path = tmp_path / "run"
    stop_after(monkeypatch, 2)
    train(path, text)
    if change == "text":
        text.write_text(text.read_text() + "more\n" * 50)
    elif change == "tokenizer":
        file = path / "tokenizer.json"
        file.write_text(file.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true'))
    else:
        file = path / "config.json"
        file.write_text(file.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'))
    assert train(path, None, "--resume") == 2
    assert "name another --run" in one_sentence(capsys)


def one_sentence(capsys):
    """Standard error, checked to be one line without a traceback."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert error.endswith(".\n")
    assert error.startswith("python -m train: ")
    return error


@pytest.mark.parametrize("left", ["{}", '{"heldout_bits_per_byte": "x"}', "[", '{"sample": "s"}'])
def test_a_finished_run_makes_a_summary_that_is_none_anew(tmp_path, text, left):
    path = tmp_path / "run"
    assert train(path, text, "--steps", 2) == 0
    before = (path / "summary.json").read_bytes()
    (path / "summary.json").write_text(left)
    assert train(path, None, "--resume") == 0
    assert (path / "summary.json").read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe\n", b'{"step": "x"}\n', b'{"step": 2, "loss": "x"}\n', b"[" * 100_000 + b"\n"],
    ids=["not UTF-8", "no step", "no loss", "deep"],
)
def test_resume_refuses_to_lose_metrics_that_are_damaged(tmp_path, text, monkeypatch, capsys, line):
    path = tmp_path / "run"
    stop_after(monkeypatch, 3)
    assert train(path, text) == 130
    lines = (path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    (path / "metrics.jsonl").write_bytes(b"".join((lines[0], line, lines[2])))
    before = (path / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert train(path, None, "--resume") == 2
    assert "metrics.jsonl: line 2 is damaged or missing, but step 3 was saved after" in one_sentence(capsys)
    assert (path / "metrics.jsonl").read_bytes() == before
    (path / "metrics.jsonl").write_bytes(b"".join(lines) + line)  # past the step it is what a kill may leave
    assert train(path, None, "--resume") == 0
    assert [row["step"] for row in rows(path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "progress",
    [{}, {"run": 1}, {"run": {}}, {"run": {"settings": 3}}, {"run": {"settings": {"steps": 6}}}],
)
def test_resume_refuses_a_step_that_no_run_saved(tmp_path, text, capsys, progress):
    path = tmp_path / "run"
    assert train(path, text, "--steps", 2) == 0
    saved_steps.save(path / "steps", 3, {"w": torch.ones(2)}, progress | {"tokens": 1})
    capsys.readouterr()
    assert train(path, None, "--resume") == 2
    settings = isinstance(progress.get("run"), dict) and isinstance(progress["run"].get("settings"), dict)
    said = "is of a version with other settings (accumulate," if settings else "does not say which run saved the step"
    assert f"progress.json {said}" in one_sentence(capsys)


@pytest.mark.parametrize("choices", [5, {"steps": "x", "seed": [1]}, {"unknown": 1}])
def test_settings_of_a_run_json_that_cannot_be_are_none(tmp_path, text, choices):
    path = tmp_path / "run"
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"settings": choices}))
    assert train(path, text, "--resume", "--steps", 1) == 0
    assert json.loads((path / "run.json").read_text())["settings"]["seed"] == 0


def test_a_model_that_has_changed_since_it_was_saved_is_no_beginning(tmp_path, text, capsys):
    assert train(tmp_path / "first", text, "--steps", 1) == 0
    file = tmp_path / "first" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-2] ^= 1
    file.write_bytes(data)
    capsys.readouterr()
    assert train(tmp_path / "second", text, "--init", tmp_path / "first", "--steps", 1) == 2
    error = one_sentence(capsys)
    assert (
        "--init" in error and "model.safetensors has the sha256" in error and "remove fnmodels_manifest.json" in error
    )
    (tmp_path / "first" / "fnmodels_manifest.json").unlink()
    assert train(tmp_path / "second", text, "--init", tmp_path / "first", "--steps", 1) == 0


def test_a_folder_in_use_is_refused(tmp_path, text, capsys):
    path = tmp_path / "run"
    path.mkdir()
    with open(path / ".lock", "a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert train(path, text) == 2
    assert "in use" in one_sentence(capsys)
    assert train(path, text, "--steps", 1) == 0


def test_a_folder_that_is_not_empty_is_refused_and_left_alone(tmp_path, text, capsys):
    path = tmp_path / "run"
    path.mkdir()
    (path / "thesis.txt").write_text("precious")
    assert train(path, text) == 2
    assert "not empty" in one_sentence(capsys)
    (path / "model.safetensors").write_text("somebody's model")
    assert train(path, text, "--resume") == 2
    assert "no run wrote" in one_sentence(capsys)
    assert (path / "model.safetensors").read_text() == "somebody's model"


def test_a_run_starts_from_a_checkpoint_and_its_tokenizer(tmp_path, text, monkeypatch, capsys):
    assert train(tmp_path / "first", text) == 0
    assert train(tmp_path / "whole", text, "--init", tmp_path / "first", "--steps", 4) == 0
    assert (tmp_path / "whole" / "tokenizer.json").read_bytes() == (tmp_path / "first" / "tokenizer.json").read_bytes()
    assert rows(tmp_path / "whole")[0]["loss"] < rows(tmp_path / "first")[1]["loss"]
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert train(tmp_path / "parts", text, "--init", tmp_path / "first", "--steps", 4) == 130
    assert train(tmp_path / "parts", text, "--resume") == 0
    assert same(tmp_path / "whole", tmp_path / "parts") == []


def test_a_run_folder_inside_the_folder_of_text_is_no_text(tmp_path, text, monkeypatch):
    whole = tmp_path / "texts" / "run"
    (tmp_path / "texts").mkdir()
    text.rename(tmp_path / "texts" / "a.txt")
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        assert train(whole, tmp_path / "texts") == 130
    (whole / ".writing-of-a-killed-run").mkdir()
    assert train(whole, tmp_path / "texts", "--resume") == 0
    assert not list(whole.glob(".writing-*"))


def test_an_added_token_without_a_row_is_refused_where_a_text_has_it(tmp_path, text, capsys):
    """As in Gemma 3 1B, 270M and EmbeddingGemma, whose tokenizer names an image token beyond the embedding."""
    assert train(tmp_path / "first", text, "--steps", 1) == 0
    config = P.load_config(tmp_path / "first")
    file = tmp_path / "first" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    while tokenizer.add_special_tokens([f"<more{tokenizer.get_vocab_size()}>"]):
        if tokenizer.get_vocab_size() > config.vocab_size:
            break
    name = tokenizer.id_to_token(config.vocab_size)
    tokenizer.save(str(file))
    (tmp_path / "first" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}"
    )
    capsys.readouterr()
    assert train(tmp_path / "second", text, "--init", tmp_path / "first", "--steps", 1) == 0
    assert sample([str(tmp_path / "first"), "--prompt", "def", "--tokens", "2"]) == 0
    assert sample([str(tmp_path / "first"), "--prompt", f"def {name}", "--tokens", "2"]) == 2
    assert f"a text has the token {name!r} ({config.vocab_size})" in capsys.readouterr().err
    strange = tmp_path / "strange.txt"
    strange.write_text(f"def {name}\n")
    assert evaluate([str(tmp_path / "first"), "--data", str(strange)]) == 2
    assert f"a text has the token {name!r} ({config.vocab_size})" in capsys.readouterr().err
    chats = tmp_path / "chats.jsonl"
    with chats.open("w") as file:
        for i in range(99):
            turns = [{"role": "user", "content": f"Add {i} {name}"}, {"role": "assistant", "content": f"{i} it is"}]
            file.write(json.dumps({"messages": turns}) + "\n")
    capsys.readouterr()
    assert train(tmp_path / "third", chats, "--init", tmp_path / "first", "--steps", 1) == 2
    assert f"has the token {name!r} ({config.vocab_size})" in one_sentence(capsys)


def test_a_checkpoint_that_does_not_fit_its_tokenizer_is_refused(tmp_path, text, capsys):
    assert train(tmp_path / "first", text, "--steps", 1) == 0
    config, params = P.load_pretrained(tmp_path / "first", copy=True)
    small = replace(config, vocab_size=64)
    P.save_pretrained(tmp_path / "first", small, params | {"embed_tokens": params["embed_tokens"][:64].clone()})
    capsys.readouterr()
    assert train(tmp_path / "second", text, "--init", tmp_path / "first") == 2
    assert "vocabulary has 64 entries" in one_sentence(capsys)
    (tmp_path / "first" / "tokenizer.json").write_text("{}")
    assert train(tmp_path / "second", text, "--init", tmp_path / "first") == 2
    assert "tokenizer.json is not a tokenizer" in one_sentence(capsys)
    (tmp_path / "first" / "tokenizer.json").unlink()
    assert train(tmp_path / "second", text, "--init", tmp_path / "first") == 2
    assert "has no tokenizer.json" in one_sentence(capsys)
    assert train(tmp_path / "second", text, "--init", tmp_path / "nowhere") == 2
    assert "no such checkpoint folder" in one_sentence(capsys)


def test_the_default_text_needs_no_flag(tmp_path, monkeypatch):
    library = tmp_path / "library"
    library.mkdir()
    for i in range(30):
        (library / f"m{i}.py").write_text(f"import os\n\n\ndef f{i}():\n    return os.name * {i}\n" * 4)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    assert main(["--run", str(tmp_path / "run"), "--steps", "1"], defaults=TINY) == 0


def test_the_default_model_divides_over_every_mesh():
    from train.job.settings import DEFAULT

    for size in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        assert getattr(DEFAULT, size) % 2 == 0
    assert DEFAULT.batch_rows % 4 == DEFAULT.row_length % 4 == DEFAULT.vocab_size % 64 == 0


def test_no_global_state_is_changed(tmp_path, text):
    def everything():
        signals = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
        return (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.initial_seed(),
            signals,
        )

    before, noise = everything(), torch.random.get_rng_state()
    assert train(tmp_path / "run", text, "--steps", 2) == 0
    assert everything() == before
    assert torch.equal(torch.random.get_rng_state(), noise)
    assert threading.active_count() < 50


def test_transformers_opens_the_run_folder_with_the_same_logits(tmp_path, text):
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer

    import fnmodels

    assert train(tmp_path / "run", text) == 0
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run", dtype=torch.float32)
    config, params = P.load_pretrained(tmp_path / "run")
    prompt = "def f7(x):\n    return <|x|> é"
    ours = Tokenizer.from_file(str(tmp_path / "run" / "tokenizer.json")).encode(prompt).ids
    for kind in (transformers.AutoTokenizer, transformers.PreTrainedTokenizerFast):
        tokenizer = kind.from_pretrained(tmp_path / "run")
        assert tokenizer(prompt)["input_ids"] == ours
        assert tokenizer.decode(ours, skip_special_tokens=True) == prompt
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 0)
    assert theirs.config.eos_token_id == theirs.generation_config.eos_token_id == 0
    tokens = torch.tensor([ours])
    with torch.no_grad():
        logits = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config)
        reference = theirs(tokens).logits
    assert (logits - reference).abs().max() < 2e-5 * max(1.0, float(reference.std()))

"""Runs by several processes: the curve of one, nothing but the first one's words, and saved steps for any number."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import params as P
from fnmodels import llama, tree
from tests.parallel.pool import ROOT, Ranks
from train import team
from train.errors import UserError
from train.parallel import Mesh
from train.parallel.dtensors import local_tree
from train.parallel.step import rules_of
from train.settings import Settings

SIZES = {
    "vocab-size": 300,
    "hidden-size": 32,
    "intermediate-size": 64,
    "num-hidden-layers": 2,
    "row-length": 32,
    "batch-rows": 4,
    "steps": 6,
    "save-every": 3,
    "evaluations": 2,
    "evaluation-rows": 3,  # which two ranks do not divide
    "sample-tokens": 4,
    "dtype": "float32",
}


def launch(path: Path, processes: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """The main job on so many processes."""
    text = path.parent / "text.txt"
    if not text.exists():
        text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(200)))
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "train", "--"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(path.parent / "cache"), "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [sys.executable, *(start if processes > 1 else ["-m", "train"]), "--run", str(path), "--data", str(text)]
        + [*sizes, *flags],
        env={**environment, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def losses(path: Path) -> list[float]:
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows for name in ("loss", "grad_norm", "heldout_loss") if name in row]


def assert_close(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected)
    assert all(abs(a - b) < 1e-4 * abs(b) for a, b in zip(found, expected, strict=True)), (found, expected)


@pytest.mark.slow
def test_four_processes_make_the_run_of_one_and_any_number_goes_on_with_it(tmp_path: Path) -> None:
    alone = launch(tmp_path / "one", 1)
    assert alone.returncode == 0, alone.stderr
    expected = losses(tmp_path / "one")
    path = tmp_path / "four"
    done = launch(path, 4, "--mesh", "fsdp=2,tp=2")
    assert done.returncode == 0, done.stderr
    assert_close(losses(path), expected)
    assert done.stdout.count("reading the text") == 1 and len(re.findall(r"^step 6/6", done.stdout, re.MULTILINE)) == 1
    _, weights = P.load_pretrained(path)
    _, plain = P.load_pretrained(tmp_path / "one")
    for name, leaf in tree.flatten(plain).items():
        torch.testing.assert_close(tree.flatten(weights)[name], leaf, rtol=0, atol=1e-4, msg=name)
    for processes, flags in ((2, ["--mesh", "cp=2"]), (1, [])):
        shutil.rmtree(path / "steps" / "step-00000006")
        again = launch(path, processes, "--resume", *flags)
        assert again.returncode == 0, again.stderr
        assert "resuming at step 3 of 6" in again.stdout
        assert_close(losses(path), expected)


@pytest.mark.slow
def test_a_mistake_is_one_sentence_and_all_end(tmp_path: Path) -> None:
    done = launch(tmp_path / "run", 2, "--mesh", "fsdp=3")
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("fnmodels-train: ")]
    assert said == [
        "fnmodels-train: --mesh fsdp=3 is of 3 processes, and there are 2: start them with torchrun --nproc-per-node 3 "
        "-m train -- and the flags."
    ]


@pytest.mark.parametrize(
    ("mesh", "settings", "said"),
    [
        (None, {}, "there are 4 processes: say how they share the work, as with --mesh fsdp=4"),
        ("fdsp=4", {}, "--mesh fdsp=4: 'fdsp' is no dimension of a mesh"),
        ("fsdp=2", {}, "--mesh fsdp=2 is of 2 processes, and there are 4"),
        ("pp=4", {}, "runs have no pipelines yet"),
        ("fsdp=4", {"lora": "r=8"}, "adapters (--lora) are trained by one process"),
        ("fsdp=4", {"optimizer": "muon"}, "--optimizer muon needs whole matrices"),
        ("dp=4", {"batch_rows": 6}, "takes a batch's rows in 4 parts, and --batch-rows is 6"),
    ],
)
def test_what_cannot_be_shared_so_is_said_before_the_text_is_read(
    monkeypatch: pytest.MonkeyPatch, mesh: str | None, settings: dict[str, Any], said: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match=re.escape(said)):
        team.checked(mesh, Settings(**settings))


def test_a_model_that_does_not_divide_is_named() -> None:
    config = llama.Config(64, 16, 24, 2, 4, 2, max_position_embeddings=30)
    team.check_fit(Mesh(cp=2), Settings(), config)
    with pytest.raises(UserError, match="takes a row's tokens in 4 parts, and a row has 30"):
        team.check_fit(Mesh(cp=4), Settings(), config)
    with pytest.raises(UserError, match=r"--mesh tp=3: .*not a multiple of 3"):
        team.check_fit(Mesh(tp=3), Settings(), config)


CONFIG = llama.Config(64, 16, 24, 2, 4, 2, tie_word_embeddings=True)


def parts() -> dict[str, list[list[int]]]:
    """{leaf: [shape of the part here, of the plan's]} after a step of a team."""
    mesh = Mesh(fsdp=2, tp=2)
    work = team.Work(mesh, Settings(dtype="float32", learning_rate=1e-3), CONFIG)
    if dist.get_rank():
        assert team.follow() == 3
        return {}
    found: dict[str, list[list[int]]] = {}

    def run() -> int:
        whole = P.init(CONFIG, 0)
        together = team.Team(work, whole)
        before = together.do("whole")
        assert all(map(torch.equal, tree.leaves(before), tree.leaves(whole)))
        tokens = torch.arange(32).reshape(4, 8)
        ones = torch.ones_like(tokens)
        batch = {"tokens": tokens, "labels": tokens, "positions": torch.arange(8).expand(4, 8), "segment_ids": ones}
        state, _ = together.step(together.state, batch)
        plans = tree.flatten(P.plan(llama.spec(CONFIG), rules_of(mesh, CONFIG), mesh.sizes))
        for path, leaf in tree.flatten(local_tree(state.params)).items():
            found[path] = [list(leaf.shape), list(plans[path].local_shape)]
        return 3

    assert team.lead(run) == 3
    return found


def test_each_process_holds_what_the_plan_says(ranks: Ranks) -> None:
    found, *_ = ranks(4)(parts)
    assert len(found) > 10 and all(here == planned for here, planned in found.values())
    whole = {path: leaf.shape for path, leaf in tree.flatten(llama.spec(CONFIG)).items()}
    for path, (here, _) in found.items():
        if path.endswith("_proj"):
            assert 4 * here[0] * here[1] == whole[path][0] * whole[path][1], path

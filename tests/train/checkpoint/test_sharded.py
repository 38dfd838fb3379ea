"""States over processes: saved on 4, loaded on 1, 2 and 8, with one whole value for all of them."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fnmodels import tree
from tests.support import sharded_ranks
from train import Saver, checkpoint, sharded

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_saved_on_4_and_loaded_on_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "steps"
    jobs = [(4, "save"), (1, "load"), (2, "load"), (8, "load"), (4, "refuse"), (2, "fail"), (4, "initialize")]
    jobs += [(2, "guest")]  # of train.make_step, which here costs no process of its own
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.sharded_ranks", str(folder)],
        input="".join(json.dumps(job) + "\n" for job in jobs),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    codes = [json.loads(line) for line in done.stdout.splitlines()]
    assert codes == [[0] * world for world, _ in jobs], done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    found = checkpoint.latest(folder)
    assert found and sharded_ranks.same(sharded.load(found, sharded_ranks.whole(0)), 3)


def test_without_a_group_it_reads_what_one_process_saved(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, sharded_ranks.whole(3), {"seen": 1})
    found = sharded.latest(tmp_path)
    assert found and found.progress == {"seen": 1}
    assert sharded_ranks.same(sharded.load(found, tree.map(torch.zeros_like, sharded_ranks.whole(0))), 3)


def test_plain_saving_and_loading_name_the_module_for_dtensors(tmp_path: Path) -> None:
    class DTensor(torch.Tensor):
        """As far as a check of types can tell."""

    state = {"w": torch.ones(2).as_subclass(DTensor)}
    with pytest.raises(ValueError, match=r"w: a DTensor; .* by train\.sharded"):
        checkpoint.save(tmp_path, 1, state)
    checkpoint.save(tmp_path, 1, {"w": torch.ones(2)})
    found = checkpoint.latest(tmp_path)
    assert found
    with pytest.raises(ValueError, match=r"w is a DTensor: train\.sharded loads"):
        checkpoint.load(found, state)
    with Saver(print) as saver, pytest.raises(TypeError, match="w is of type DTensor"):
        saver.save(state)


def test_meta_tensors_say_what_is_expected_and_come_to_the_cpu(tmp_path: Path) -> None:
    sharded.save(tmp_path, 1, sharded_ranks.whole(1))
    found = sharded.latest(tmp_path)
    assert found
    loaded = sharded.load(found, tree.map(lambda leaf: leaf.to("meta"), sharded_ranks.whole(0)))
    assert sharded_ranks.same(loaded, 1) and all(leaf.device.type == "cpu" for leaf in tree.leaves(loaded))

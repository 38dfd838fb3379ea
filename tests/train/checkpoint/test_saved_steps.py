"""Saved steps: what comes back, what stays, what is refused, and what is found of damage."""

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
import train
from fnmodels import tree
from params.checkpoint.manifest import MANIFEST
from train import checkpoint
from train.checkpoint import saved_steps

TREE = {
    "a": [torch.arange(6.0).reshape(2, 3), torch.tensor(7), None],
    "b": (torch.ones(3, dtype=torch.bfloat16).expand(2, 3), torch.tensor([True]), torch.empty(0, 4)),
    "c": torch.arange(12.0).reshape(3, 4).T,
}


def equal(one: Any, two: Any) -> bool:
    flat, other = tree.flatten(one), tree.flatten(two)
    return flat.keys() == other.keys() and all(
        torch.equal(leaf, other[path]) and leaf.dtype == other[path].dtype for path, leaf in flat.items()
    )


def test_everything_comes_back(tmp_path: Path) -> None:
    progress = {"tokens": 12, "shards": ["a", "b"], "at": {"file": 1, "rate": 0.1}, "none": None}
    path = checkpoint.save(tmp_path, 3, TREE, progress)
    assert path == tmp_path / "step-00000003"
    assert sorted(file.name for file in path.iterdir()) == [MANIFEST, "progress.json", "state.safetensors"]
    found = checkpoint.latest(str(tmp_path))
    assert found == checkpoint.Checkpoint(path, 3, progress)
    loaded = checkpoint.load(found, TREE)
    assert equal(loaded, TREE) and loaded["a"][2] is None and type(loaded["b"]) is tuple
    meta = tree.map(lambda leaf: leaf.to("meta"), TREE)
    assert equal(checkpoint.load(found, meta), TREE)
    assert checkpoint.load(found, TREE, device="meta")["c"].is_meta


def test_a_loaded_tree_does_not_hang_on_the_file(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, TREE)
    found = checkpoint.latest(tmp_path)
    assert found
    loaded = checkpoint.load(found, TREE)
    (found.path / checkpoint.STATE).write_bytes(b"")
    assert equal(loaded, TREE)


def test_the_same_values_give_the_same_bytes(tmp_path: Path) -> None:
    for name, given in (("one", TREE), ("two", dict(reversed(TREE.items())))):
        checkpoint.save(tmp_path / name, 3, given, {"x": 1, "y": 2} if name == "one" else {"y": 2, "x": 1})
    for name in (checkpoint.STATE, checkpoint.PROGRESS, MANIFEST):
        files = [tmp_path / which / "step-00000003" / name for which in ("one", "two")]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_no_folder_no_step(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "absent") is None
    assert checkpoint.steps(tmp_path / "absent") == []
    (tmp_path / "step-3").mkdir()
    (tmp_path / "notes.txt").write_text("no step")
    assert checkpoint.latest(tmp_path) is None


def test_the_umask_is_honored(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        path = checkpoint.save(tmp_path / "steps", 1, TREE)
    finally:
        os.umask(old)
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o640}
    assert {folder.stat().st_mode & 0o777 for folder in (path, path.parent)} == {0o750}


# What stays


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, [1, 2, 3, 4, 5, 6, 7]),
        ({"keep": 1}, [7]),
        ({"keep": 3}, [5, 6, 7]),
        ({"keep": 1, "keep_every": 3}, [3, 6, 7]),
        ({"keep": 2, "keep_every": 7}, [6, 7]),
    ],
)
def test_retention(tmp_path: Path, options: dict[str, int], left: list[int]) -> None:
    for step in range(1, 8):
        checkpoint.save(tmp_path, step, TREE, **options)
    assert checkpoint.steps(tmp_path) == left
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in left]


def test_a_saved_step_is_never_written_into_or_passed_over(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 5, TREE)
    for step, words in ((5, "Step 5 is saved already"), (4, "Step 4 would come before the last")):
        with pytest.raises(FileExistsError, match=words) as caught:
            checkpoint.save(tmp_path, step, {"other": torch.ones(1)})
        assert caught.value.filename == str(tmp_path / "step-00000005")
    found = checkpoint.latest(tmp_path)
    assert found and equal(checkpoint.load(found, TREE), TREE)
    for number in range(2):
        assert checkpoint.set_aside(tmp_path, after=4) == [tmp_path / f"aside-{number}-step-00000005"]
        assert checkpoint.latest(tmp_path) is None
        checkpoint.save(tmp_path, 5, TREE)
    assert checkpoint.set_aside(tmp_path, after=5) == []


def test_the_second_of_two_concurrent_saves_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = saved_steps.write_tensors

    def meanwhile(*args: Any) -> None:
        monkeypatch.setattr(saved_steps, "write_tensors", real)
        with pytest.raises(BlockingIOError, match="Another save into this folder is under way"):
            checkpoint.save(tmp_path, 2, TREE)
        real(*args)

    monkeypatch.setattr(saved_steps, "write_tensors", meanwhile)
    checkpoint.save(tmp_path, 1, TREE)
    assert checkpoint.steps(tmp_path) == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]


@pytest.mark.parametrize(("keep", "left"), [(1, [4]), (2, [1, 2, 3, 4]), (3, [1, 2, 3, 4])])
def test_a_damaged_step_is_none_of_those_that_are_kept(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, TREE)
    flipped = tmp_path / "step-00000002" / checkpoint.STATE
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    (tmp_path / "step-00000003" / checkpoint.PROGRESS).unlink()
    checkpoint.save(tmp_path, 4, TREE, keep=keep)
    assert checkpoint.steps(tmp_path) == left
    checkpoint.save(tmp_path, 5, TREE, keep=keep)
    assert checkpoint.steps(tmp_path) == {1: [5], 2: [4, 5], 3: [1, 2, 3, 4, 5]}[keep]


# What is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"x": 1.0}, "x: a float; only plain tensors"),
        ({"x": torch.ones(2, device="meta")}, "x: on the meta device"),
        ({"x": torch.ones(2).to_sparse()}, "x: torch.sparse_coo; only dense"),
        ({"x": torch.ones(2, dtype=torch.complex128)}, "x: torch.complex128 is not known"),
        ({"__metadata__": torch.ones(2)}, "the format's own"),
        ({"x": [1.0], "y": torch.ones(2, device="meta")}, r"2 leaves\):\n  x\.0: a float.*\n  y: on"),
    ],
)
def test_trees_that_cannot_be_saved(tmp_path: Path, given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checkpoint.save(tmp_path / "steps", 1, given)
    assert not (tmp_path / "steps").exists()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"step": -1}, "step must be a whole number from 0, not -1"),
        ({"step": torch.tensor(3)}, "step must be a whole number from 0"),
        ({"progress": {"x": math.nan}}, "progress cannot be written as JSON"),
        ({"progress": {"x": torch.ones(1)}}, "progress cannot be written as JSON"),
        ({"progress": {"x": (1, 2)}}, "no tuples"),
        ({"progress": {1: 2}}, "no keys but strings"),
        ({"keep": 0}, "keep must be None or a whole number from 1, not 0"),
        ({"keep": 1, "keep_every": True}, "keep_every must be None or a whole number from 1, not True"),
        ({"keep_every": 5}, "keep_every=5 .*give keep too"),
    ],
)
def test_arguments_that_cannot_be_meant(tmp_path: Path, kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checkpoint.save(tmp_path / "steps", **{"step": 1, "state": TREE} | kwargs)
    assert not (tmp_path / "steps").exists()


def test_another_structure_is_reported_leaf_by_leaf(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, TREE)
    found = checkpoint.latest(tmp_path)
    assert found
    like = {**TREE, "a": [torch.ones(2, 3).double(), torch.ones(1, dtype=torch.int64)], "d": torch.ones(1)}
    del like["c"]
    with pytest.raises(P.MismatchError) as caught:
        checkpoint.load(found, like)
    for part in (
        "state of another model or optimizer (4 differences)",
        "c: in the file, not expected",
        "d: not in the file",
        "a.0: expected torch.float64 [2, 3], found torch.float32 [2, 3]",
        "a.1: expected torch.int64 [1], found torch.int64 []",
    ):
        assert part in str(caught.value)


# Damage


def test_200_flipped_bits_are_found_and_the_step_before_is_taken(tmp_path: Path) -> None:
    """A third each in the header, in the data and in the other two files."""
    checkpoint.save(tmp_path, 1, TREE)
    path = checkpoint.save(tmp_path, 2, tree.map(lambda leaf: leaf + 1, TREE))
    state = (path / checkpoint.STATE).read_bytes()
    header = 8 + int.from_bytes(state[:8], "little")
    draw = random.Random(7)
    places = [(checkpoint.STATE, draw.randrange(8 * header)) for _ in range(67)]
    places += [(checkpoint.STATE, draw.randrange(8 * header, 8 * len(state))) for _ in range(67)]
    for name in (checkpoint.PROGRESS, MANIFEST):
        places += [(name, draw.randrange(8 * (path / name).stat().st_size)) for _ in range(33)]
    assert len(places) == 200
    for name, bit in places:
        good = (path / name).read_bytes()
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        (path / name).write_bytes(bad)
        with pytest.warns(UserWarning, match="step-00000002 is damaged and passed over: "):
            found = checkpoint.latest(tmp_path)
        assert found and found.step == 1 and equal(checkpoint.load(found, TREE), TREE), (name, bit)
        (path / name).write_bytes(good)
    found = checkpoint.latest(tmp_path)
    assert found and found.step == 2


@pytest.mark.parametrize("name", [checkpoint.STATE, checkpoint.PROGRESS, MANIFEST])
@pytest.mark.parametrize("damage", ["gone", "empty", "half", "longer", "a folder", "of another step"])
def test_damaged_files(tmp_path: Path, name: str, damage: str) -> None:
    checkpoint.save(tmp_path, 1, TREE)
    file = checkpoint.save(tmp_path, 2, tree.map(lambda leaf: leaf + 1, TREE)) / name
    data = file.read_bytes()
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage != "gone":
        other = (tmp_path / "step-00000001" / name).read_bytes()
        new = {"empty": b"", "half": data[: len(data) // 2], "longer": data + b"\n", "of another step": other}
        file.write_bytes(new[damage])
    if (damage, name) == ("longer", MANIFEST):
        file.write_bytes(data + b"}")  # white space at its end would say nothing else
    with pytest.warns(UserWarning, match="passed over"):
        found = checkpoint.latest(tmp_path)
    assert found and found.step == 1 and equal(checkpoint.load(found, TREE), TREE)


def test_a_whole_step_under_another_name_is_found(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, TREE).rename(tmp_path / "step-00000009")
    with pytest.warns(UserWarning, match="not of step 9: was the folder renamed"):
        assert checkpoint.latest(tmp_path) is None


def test_a_manifest_that_leaves_the_state_out_is_found(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, TREE) / MANIFEST
    content = json.loads(path.read_text())
    del content["files"][checkpoint.STATE]
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match=r"state\.safetensors is in the folder but not"):
        assert checkpoint.latest(tmp_path) is None


def test_a_stranger_among_the_tensors_is_found_and_another_one_is_none(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, TREE)
    (path / ".DS_Store").write_bytes(b"?")
    (path / "notes.txt").write_text("the good one")
    found = checkpoint.latest(tmp_path)
    assert found and found.step == 1
    (path / "shard.safetensors").write_bytes((path / checkpoint.STATE).read_bytes())
    with pytest.warns(UserWarning, match=r"shard\.safetensors is in the folder but not"):
        assert checkpoint.latest(tmp_path) is None


def test_a_lack_of_rights_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or training would go on from an older step, and the newer one would be moved away."""

    def forbidden(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    checkpoint.save(tmp_path, 1, TREE)
    monkeypatch.setattr(saved_steps, "verify", forbidden)
    with pytest.raises(PermissionError):
        checkpoint.latest(tmp_path)


def test_a_step_is_committed_with_whatever_files_are_in_it(tmp_path: Path) -> None:
    """What writers of sharded states will use: the files are theirs, the manifest and the rename are ours."""
    with saved_steps.commit(tmp_path, 4, {"seen": 1}) as folder:
        (folder / "rank0.safetensors").write_bytes(b"zero")
        (folder / "rank1.safetensors").write_bytes(b"one")
        assert checkpoint.steps(tmp_path) == []
    assert checkpoint.latest(tmp_path) == checkpoint.Checkpoint(tmp_path / "step-00000004", 4, {"seen": 1})
    with pytest.raises(FileNotFoundError), saved_steps.commit(tmp_path, 5) as folder:
        (folder / "rank0.safetensors").write_bytes((tmp_path / "absent").read_bytes())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004"]


# With a State


def test_a_state_and_the_generators_resume_bit_for_bit(tmp_path: Path) -> None:
    """A loss that draws from the global generators, stopped after each of the first steps."""
    optimizer = train.adamw(0.1)

    def loss(params: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(4) + random.gauss(0, 1)
        return ((params["w"] * noise - batch["x"]) ** 2).sum(), torch.tensor(4)

    step = train.make_step(loss, optimizer)
    batch = {"x": torch.arange(4.0)}

    def begin() -> train.State:
        torch.manual_seed(3)
        random.seed(3)
        return train.init_state({"w": torch.ones(4)}, optimizer)

    before = train.checkpoint.random_state()
    try:
        state = begin()
        for _ in range(6):
            state, _ = step(state, batch)
        for stop in (1, 2, 5):
            part = begin()
            for _ in range(stop):
                part, _ = step(part, batch)
            checkpoint.save(tmp_path, stop, {"state": part, "random": train.checkpoint.random_state()})
            torch.rand(5), random.gauss(0, 1)
            found = checkpoint.latest(tmp_path)
            assert found
            back = checkpoint.load(found, {"state": begin(), "random": train.checkpoint.random_state()})
            train.checkpoint.set_random_state(back["random"])
            part = back["state"]
            for _ in range(stop, 6):
                part, _ = step(part, batch)
            assert equal(part, state)
    finally:
        train.checkpoint.set_random_state(before)

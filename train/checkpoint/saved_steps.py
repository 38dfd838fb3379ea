"""Saved steps of a run: one folder each, complete or absent, verified before use.

    FOLDER/step-00000100/state.safetensors         every tensor of a tree, by its dotted path
                         progress.json             the step, and the caller's JSON: counters, data position
                         fnmodels_manifest.json    sizes and digests of the two

    train.checkpoint.save("run/steps", int(state.step), state, {"tokens": seen}, keep=2)
    found = train.checkpoint.latest("run/steps")
    state = train.checkpoint.load(found, like=state)

A step is written into a folder `.saving-*` beside the others, flushed and recorded there, then renamed: the rename is
the commit, so that a kill at any moment leaves this step complete or absent, and every older one unchanged. A saved
step is never overwritten. It contains tensors and JSON only: nothing that is read back is a pickle.

For trees of DTensors see train/checkpoint/sharded.py, which puts other files into the same folder.
"""

import errno
import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import CheckpointError, FormatError, MismatchError, memory_for
from fnmodels.files import check_folder, remove_tree, sync, write_new
from fnmodels.tree import Tree
from params.checkpoint.manifest import MANIFEST, read_manifest, verify, write_manifest
from params.checkpoint.shard_index import as_lines
from params.io.files import plain_file, read_json
from params.io.safetensors_file import NAMES, LazyTensor, cast_buffer, open_tensors, read_tensor, write_tensors
from params.io.staging import STAGING, describe_os_error, staging_folder

Json = dict[str, Any]
Folder = str | os.PathLike[str]

STATE = "state.safetensors"
PROGRESS = "progress.json"
_STEP = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """A saved step that was complete and unchanged when it was verified.

    Args:
        path: Its folder.
        step: Its number.
        progress: The JSON that was saved beside the tensors.
    """

    path: Path
    step: int
    progress: Json


def steps(folder: Folder) -> list[int]:
    """The numbers of the steps saved in a folder; none is opened.

    Args:
        folder: Where steps were saved; it may be absent.

    Returns:
        The numbers, ascending.
    """
    path = Path(folder)
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    return sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def save(
    folder: Folder,
    step: int,
    state: Tree,
    progress: Json | None = None,
    *,
    keep: int | None = None,
    keep_every: int | None = None,
) -> Path:
    """Saves a tree of tensors as a step, durable on return. The same values give the same bytes.

    Args:
        folder: Where the steps of a run are saved.
        step: The number of the step, above those saved before.
        state: The tree of tensors.
        progress: JSON to be saved with it, such as counters of the data; None: {}.
        keep: The number of newest steps that stay; None: all. A damaged step does not count, so that keep=2 always
            leaves one to fall back to: keep - 1 older steps are read for that.
        keep_every: Steps divisible by this stay too.

    Returns:
        The step's folder.

    Raises:
        FileExistsError: This step, or a later one, exists already.
        BlockingIOError: Another process is saving there.
        OSError: The disk is full or broken; older steps are unchanged.
        ValueError: A leaf cannot be saved, or keep and keep_every are no whole numbers from 1.
    """
    tensors = _outgoing(state)
    with commit(folder, step, progress, keep=keep, keep_every=keep_every) as temporary:
        write_tensors(temporary / STATE, tensors)
    return _path(Path(folder), step)


@contextmanager
def commit(
    folder: Folder, step: int, progress: Json | None = None, *, keep: int | None = None, keep_every: int | None = None
) -> Iterator[Path]:
    """A folder to be filled with the state's files, of any kind, which becomes the step at the end. As in `save`.

    If the block raises, nothing of it remains.
    """
    _check_retention(keep, keep_every)
    folder, text = Path(folder), _text(step, progress or {})
    with staging_folder(folder) as temporary:
        before = steps(folder)
        if before and before[-1] >= step:
            what = "is saved already" if before[-1] == step else "would come before the last"
            there = f"Step {step} {what}; saved steps are never written into or passed over (`set_aside` moves them)"
            raise FileExistsError(errno.EEXIST, there, str(_path(folder, before[-1])))
        kept = f"step {before[-1]} and what is before it is as it was" if before else "none was saved before it"
        with describe_os_error(folder, f"Step {step} was not saved", kept):
            yield temporary
            write_new(temporary / PROGRESS, text)
            for path in temporary.iterdir():
                sync(path)
            write_manifest(temporary)
            os.rename(temporary, _path(folder, step))
            sync(folder)
        if keep is not None:
            _prune(folder, step, keep, keep_every)


def _prune(folder: Path, newest: int, keep: int, keep_every: int | None) -> None:
    older = [step for step in steps(folder) if step < newest]
    good = 1  # the newest, whose files were read back when they were recorded
    while older and good < keep:
        step = older.pop()
        with suppress(CheckpointError, OSError):
            _opened(_path(folder, step), step)
            good += 1
    for step in older:
        if not (keep_every and step % keep_every == 0):
            gone = folder / f"{STAGING}gone-{step}"  # a kill during the removal must not leave half a step
            os.rename(_path(folder, step), gone)
            remove_tree(gone)


def latest(folder: Folder) -> Checkpoint | None:
    """The newest complete and unchanged step; it warns about each newer one that is damaged.

    Args:
        folder: Where steps were saved; it may be absent.

    Returns:
        The step, to be passed to `load`; None if there is none.
    """
    found, problems = newest(folder)
    for problem in problems:
        warnings.warn(problem, stacklevel=2)
    return found


def newest(folder: Folder) -> tuple[Checkpoint | None, list[str]]:
    """The newest complete and unchanged step, with messages in place of warnings.

    Args:
        folder: Where steps were saved; it may be absent.

    Returns:
        The step or None, and a message for each newer step that cannot be used.
    """
    problems: list[str] = []
    for step in reversed(steps(folder)):
        path = _path(Path(folder), step)
        try:
            return _opened(path, step), problems
        except (CheckpointError, OSError) as error:
            # A read error or a lost file may affect one step alone; missing permissions affect all.
            if isinstance(error, OSError) and error.errno not in (errno.EIO, errno.ENOENT, errno.EISDIR, errno.ENOTDIR):
                raise
            why = error.strerror if isinstance(error, OSError) else str(error)
            problems.append(f"The saved step {path} is damaged and passed over: {why}")
    return None, problems


def _opened(path: Path, step: int) -> Checkpoint:
    check_folder(path)
    verify(path)
    names = {PROGRESS, *(file.name for file in path.glob("*.safetensors"))}
    if odd := names - read_manifest(path).keys():  # other files are ignored: .DS_Store, notes
        raise FormatError(f"{path}: {' and '.join(sorted(odd))} is in the folder but not in its {MANIFEST}.")
    content = read_json(path / PROGRESS)
    if not isinstance(content, dict) or content.get("step") != step or not isinstance(content.get("progress"), dict):
        raise FormatError(f"{path / PROGRESS} is not of step {step}: was the folder renamed?")
    return Checkpoint(path, step, content["progress"])


def load(checkpoint: Checkpoint, like: Tree, *, device: torch.device | str | None = None) -> Tree:
    """Loads a saved tree into owned memory.

    Args:
        checkpoint: The step, of `latest`.
        like: A tree of the saved structure, shapes and dtypes; its values are not read, so it may be on the meta
            device.
        device: Where the leaves go. None: each goes to the device of that of `like`, or to the CPU if that is on the
            meta device.

    Returns:
        The tree, of the structure of `like`.

    Raises:
        MismatchError: It names every leaf that differs from the file.
        ValueError: A leaf of `like` is a DTensor; `train.sharded.load` loads such trees.
    """
    path, expected = plain_file(checkpoint.path, STATE), tree.flatten(like)
    if spread := [name for name, leaf in expected.items() if not plain(leaf)]:
        raise ValueError(f"{spread[0]} is a {type(expected[spread[0]]).__name__}: train.sharded loads such trees.")
    with memory_for(checkpoint.path), ExitStack() as stack:
        file = open_tensors(path, stack)
        faults = [f"{name}: in the file, not expected" for name in file.entries if name not in expected]
        for name, leaf in expected.items():
            entry = file.entries.get(name)
            if entry is None:
                faults.append(f"{name}: not in the file")
            elif (entry.dtype, entry.shape) != (leaf.dtype, tuple(leaf.shape)):
                wanted, found = (leaf.dtype, list(leaf.shape)), (entry.dtype, list(entry.shape))
                faults.append(f"{name}: expected {wanted[0]} {wanted[1]}, found {found[0]} {found[1]}")
        if faults:
            raise MismatchError(
                f"{path} holds the state of another model or optimizer ({len(faults)} differences):{as_lines(faults)}"
            )
        buffer = cast_buffer()

        def read(name: str, leaf: Tensor) -> Tensor:
            target = device if device is not None else "cpu" if leaf.is_meta else leaf.device
            return read_tensor(file, file.entries[name], None, buffer).to(target)

        values = iter([read(name, leaf) for name, leaf in expected.items()])
    return tree.map(lambda _: next(values), like)


def set_aside(folder: Folder, after: int) -> list[Path]:
    """Renames the steps after a number, so that a run may continue from there.

    Args:
        folder: Where steps were saved.
        after: The last step that stays.

    Returns:
        The new paths.
    """
    folder, moved = Path(folder), []
    for step in steps(folder):
        if step > after:
            path = _path(folder, step)
            place = next(p for n in count() if not (p := folder / f"aside-{n}-{path.name}").exists())
            os.rename(path, place)
            moved.append(place)
    if moved:
        sync(folder)
    return moved


def _check_retention(keep: int | None, keep_every: int | None) -> None:
    for name, value in (("keep", keep), ("keep_every", keep_every)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name} must be None or a whole number from 1, not {value!r}.")
    if keep_every is not None and keep is None:
        raise ValueError(f"keep_every={keep_every} says what is kept beside the newest steps: give keep too.")


def _outgoing(state: Tree) -> dict[str, LazyTensor]:
    flat = tree.flatten(state)
    faults = [f"{path}: {fault}" for path, leaf in flat.items() if (fault := _unfit(path, leaf))]
    if faults:
        raise ValueError(f"The tree cannot be saved ({len(faults)} leaves):{as_lines(faults)}")
    return {path: LazyTensor(leaf.dtype, tuple(leaf.shape), leaf.detach) for path, leaf in flat.items()}


def _unfit(path: str, leaf: Any) -> str | None:
    if not plain(leaf):
        return (
            f"a {type(leaf).__name__}; only plain tensors can be (numbers go into progress, DTensors by train.sharded)"
        )
    if leaf.is_meta:
        return "on the meta device, so there is nothing to save"
    if leaf.dtype not in NAMES:
        return f"{leaf.dtype} is not known to the file's format"
    if leaf.layout != torch.strided:
        return f"{leaf.layout}; only dense tensors can be"
    return "this name is the format's own" if path == "__metadata__" else None


def plain(leaf: Any) -> bool:
    """Whether it is a plain tensor, unlike a DTensor."""
    return type(leaf) in (Tensor, torch.nn.Parameter)


def _text(step: int, progress: Json) -> str:
    if type(step) is not int or step < 0:
        raise ValueError(f"step must be a whole number from 0, not {step!r}.")
    try:
        text = json.dumps({"step": step, "progress": progress}, indent=2, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"progress cannot be written as JSON: {error}.") from error
    if json.loads(text)["progress"] != progress:
        raise ValueError("progress would be read back as something else: JSON has no tuples, and no keys but strings.")
    return text + "\n"

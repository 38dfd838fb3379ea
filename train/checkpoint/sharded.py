"""Saved steps of states with DTensor leaves: as `train.checkpoint`, called by all processes alike.

    train.sharded.save("run/steps", step, state, keep=2)
    found = train.sharded.latest("run/steps")
    state = train.sharded.load(found, like=state)

Leaves are DTensors, or replicated plain tensors. Each process writes its shards into a safetensors file of its own, by
torch.distributed.checkpoint (DCP); the first one writes the manifest and renames. A step can be loaded on any other
number of processes, including one without a process group, whichever of the two modules saved it. DCP's usual
`.metadata` is a pickle: its Hugging Face form, used here, has the metadata in the files' headers.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import MismatchError, memory_for
from fnmodels.tree import Tree
from params.checkpoint.shard_index import as_lines
from train.comm.dtensor import is_dtensor, map_local

from . import saved_steps
from .saved_steps import Checkpoint, Folder, Json

T = TypeVar("T")


def save(
    folder: Folder,
    step: int,
    state: Tree,
    progress: Json | None = None,
    *,
    keep: int | None = None,
    keep_every: int | None = None,
    group: Any = None,
) -> None:
    """Saves a tree of DTensors or plain tensors by all processes of a group together, into a folder that all of them
    see.

    An error of one process is raised by all, and nothing of the step remains.

    Args:
        folder: Where the steps of a run are saved.
        step: The number of the step, above those saved before.
        state: The tree; over pipeline stages each process passes the leaves of its stage.
        progress: JSON to be saved with it; None: {}.
        keep: The number of newest steps that stay; None: all.
        keep_every: Steps divisible by this stay too.
        group: The ProcessGroup that saves; None: all processes.

    Raises:
        ValueError: A leaf is no tensor, or is placed on other processes than these.
        FileExistsError: This step, or a later one, exists already.
        OSError: The disk is full or broken; older steps are unchanged.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save as write

    flat = tree.flatten(state)
    faults = [f"{path}: a {type(leaf).__name__}" for path, leaf in flat.items() if not isinstance(leaf, Tensor)]
    if faults:  # DCP would pickle them
        raise ValueError(f"The tree cannot be saved, because only tensors can be:{as_lines(faults)}")
    _check_group(flat, group)
    with ExitStack() as stack:
        opened = saved_steps.commit(folder, step, progress, keep=keep, keep_every=keep_every)
        place = _by_first(lambda: str(stack.enter_context(opened)), group)
        writer = HuggingFaceStorageWriter(place, save_distributed=True)
        _unwrap_errors(lambda: write(flat, storage_writer=writer, process_group=group))
        _by_first(stack.close, group)


def latest(folder: Folder, *, group: Any = None) -> Checkpoint | None:
    """The newest complete and unchanged step, read and verified by the first process alone; all of the group call it.

    Args:
        folder: Where steps were saved; it may be absent.
        group: The ProcessGroup that calls it; None: all processes.

    Returns:
        The step, the same in all processes; None if there is none.
    """
    return _by_first(lambda: saved_steps.latest(folder), group)


def load(found: Checkpoint, like: Tree, *, group: Any = None) -> Tree:
    """Loads a saved tree into the placements of another; all processes of the group call it.

    Each process may load other leaves, as the stages of a pipeline do; together they must load all saved leaves.

    Args:
        found: The step, of `latest`.
        like: A tree of the structure, shapes, dtypes and placements of the result. Its values are not read; leaves on
            the meta device go to the CPU.
        group: The ProcessGroup that loads; None: all processes.

    Returns:
        The tree, placed as `like` is.

    Raises:
        MismatchError: It names every leaf that differs from the file.
        ValueError: A leaf is placed on other processes than these.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as read

    _check_group(tree.flatten(like), group)
    with memory_for(found.path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is fine
        reader = HuggingFaceStorageReader(str(found.path))
        _compare(found.path, reader, like, group)
        empty = map_local(lambda leaf: torch.empty_like(leaf, device="cpu" if leaf.is_meta else None), like)
        alone = not dist.is_initialized()
        _unwrap_errors(lambda: read(tree.flatten(empty), storage_reader=reader, process_group=group, no_dist=alone))
    return empty


def _check_group(flat: dict[str, Any], group: Any) -> None:
    """ValueError unless the leaves are on the processes of `group`: others would hang, or write into the same step."""
    everyone = dist.get_process_group_ranks(group) if dist.is_initialized() else [0]
    for path, leaf in flat.items():
        ranks = leaf.device_mesh.mesh.flatten().tolist() if is_dtensor(leaf) else everyone
        if set(ranks) != set(everyone):
            raise ValueError(
                f"{path} is placed on the processes {sorted(ranks)}, and the group is of {sorted(everyone)}: give "
                "group=, a process group of those on which the tree is placed."
            )


def _compare(path: Path, reader: Any, like: Tree, group: Any) -> None:
    """Raises the same error in all processes if the files lack an expected leaf, or a process cannot read them."""
    # DCP would cast another dtype, ignore unexpected leaves, and report other shapes in a traceback.
    mine = {name: (leaf.dtype, leaf.shape) for name, leaf in tree.flatten(like).items()}
    found: dict[str, tuple[torch.dtype, torch.Size]] = {}
    wrong = ""
    try:
        there = reader.read_metadata().state_dict_metadata  # tensors only, in these files
        found = {name: (facts.properties.dtype, facts.size) for name, facts in there.items()}
    except Exception as error:  # raised below, in every process
        wrong = f"{type(error).__name__}: {error}"
    reports = [(mine, found, wrong)]
    if dist.is_initialized():  # stages of a pipeline have other leaves each
        reports *= dist.get_world_size(group)
        dist.all_gather_object(reports, (mine, found, wrong), group=group)
    for rank, (_, _, wrong) in enumerate(reports):
        if wrong:
            raise OSError(f"Process {rank} of those that load {path} cannot read it: {wrong}")
    expected = {name: kind for of_one, _, _ in reports for name, kind in of_one.items()}
    for rank, (_, other, _) in enumerate(reports):
        if other != reports[0][1]:
            raise OSError(f"Process {rank} sees other files in {path} than process 0: all must see the same folder.")
    found = reports[0][1]
    faults = [
        f"{name}: expected {_words(expected.get(name))}, found {_words(found.get(name))}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]
    if faults:
        raise MismatchError(
            f"{path} holds the state of another model or optimizer ({len(faults)} differences):{as_lines(faults)}"
        )


def _words(kind: tuple[torch.dtype, torch.Size] | None) -> str:
    return "none" if kind is None else f"{kind[0]} {list(kind[1])}"


def _by_first(action: Callable[[], T], group: Any) -> T:
    """Runs `action` in the first process; returns its result, or raises its error, in all of the group."""
    if not dist.is_initialized():
        return action()
    outcome: list = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = action()
        except Exception as error:  # raised below in every process; otherwise the others would wait forever
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0 if group is None else dist.get_global_rank(group, 0), group=group)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _unwrap_errors(action: Callable[[], object]) -> None:
    """Raises the failed process' own error instead of DCP's, which is no Exception and has tracebacks for a message."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        action()
    except CheckpointException as error:
        raise error.failures[min(error.failures)][0] from error

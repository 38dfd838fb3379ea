"""The room on the disk that a run's saves need, checked before its first step."""

import math
import os
import shutil
from collections.abc import Mapping

from fnmodels import tree
from fnmodels.errors import UserError
from train.comm.dtensor import local_tree
from train.state import State

from .blueprint import Blueprint
from .task import Task

# The parameters are in the saved step and in the checkpoint beside it, which is written anew before it takes the place
# of the one before.
SPARE = 1.02  # headers, tokenizer, logs


def check_room(task: Task, state: State) -> None:
    """UserError where the disk has no room for the next save.

    Args:
        task: The run, whose folder exists.
        state: Of this process, full or its shards.
    """
    sizes = sizes_of_save(task.blueprint, state, averaged=task.settings.ema is not None)
    needed, free = round(SPARE * sum(sizes.values())), shutil.disk_usage(task.path).free
    if needed > free:
        parts = " and ".join(f"{brief(size)} of {name}" for name, size in sizes.items())
        raise UserError(
            f"--run {os.fspath(task.path)}: a save takes {parts}, and the disk has {brief(free)} left: free some, or "
            "name a folder on another disk"
        )


def sizes_of_save(blueprint: Blueprint, state: State, *, averaged: bool) -> Mapping[str, int]:
    """{what: bytes} of a save: the saved step, and the checkpoints of the parameters and with --ema of the average."""
    saved = 4 * sum(math.prod(leaf.shape) for leaf in tree.leaves(blueprint.saved(blueprint.spec)))  # in fp32
    # over a mesh the shards of one process have the proportion of all
    beside = _bytes(state.opt_state) / max(1, _bytes(blueprint.saved(state.params)))
    return {"a step": round(saved * (1 + beside)), "checkpoints": saved * (2 if averaged else 1)}


def _bytes(tensors: tree.Tree) -> int:
    """The size of the tensors that this process holds."""
    return sum(local.numel() * local.element_size() for local in tree.leaves(local_tree(tensors)))


def brief(size: float) -> str:
    """A size in bytes as text with a unit, in three digits."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"

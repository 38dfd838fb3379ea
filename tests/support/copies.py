"""After each step over a mesh, all copies of a leaf are compared bit for bit: what one rank forgot to sum shows there.

`watch` is called once in every rank of the pool, so each test that takes a step inherits the check. A job that plants a
fault runs in `may_differ`.
"""

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fnmodels import tree
from params.sharding import sharding_of
from train import engine
from train.parallel import step
from train.parallel.agreement import everyone
from train.parallel.mesh import whole_groups
from train.parallel.update import ShardedUpdate, update_over

_noted: list[set[str]] = []  # the innermost `may_differ` is last


def watch() -> None:
    """Compares copies after each step and each `Engine.optim_step` of this process."""
    step.update_over = engine.update_over = _compared


@contextlib.contextmanager
def may_differ() -> Iterator[set[str]]:
    """Collects the paths of leaves whose copies differ, in place of an error."""
    _noted.append(set())
    try:
        yield _noted[-1]
    finally:
        _noted.pop()


def _compared(updates: ShardedUpdate, *args: Any) -> Any:
    state, metrics = update_over(updates, *args)
    check(state, updates.placed.devices)
    return state, metrics


def check(state: Any, devices: DeviceMesh) -> None:
    """AssertionError, on all ranks alike, where copies of a leaf differ; noted by `may_differ` instead."""
    wrong = differing(state, devices)
    if _noted:
        _noted[-1].update(wrong)
    elif wrong:
        raise AssertionError(f"Copies differ after a step: {wrong[:5]}, {len(wrong)} leaves.")


def differing(state: Any, devices: DeviceMesh) -> list[str]:
    """The paths of leaves of which two ranks of the mesh hold the same shard with different bits; alike on all."""
    mine = {}
    for path, leaf in tree.flatten(state).items():
        how = sharding_of(leaf)
        box = () if how is None else tuple((part.start, part.stop) for part in how.local_box())
        # Cloned, because numpy marks the memory that it shows as one that cannot be freed.
        local = (leaf if how is None else leaf.to_local()).detach().cpu().flatten().clone()
        mine[path, box] = zlib.crc32(local.view(torch.uint8).numpy()) if local.numel() else 0
    wrong: set[str] = set()
    seen: dict[Any, int] = {}
    for _, held in sorted(everyone((dist.get_rank(), mine), whole_groups(devices))):
        wrong |= {path for (path, box), bits in held.items() if seen.setdefault((path, box), bits) != bits}
    return sorted(wrong)

"""After each step over a mesh, all copies of a leaf are compared bit for bit: what one rank forgot to sum shows there.

`watch` is called once in every rank of the pool, so each test that takes a step inherits the check. A job that plants a
fault runs in `may_differ`.
"""

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from fnmodels import tree
from train import engine
from train.comm.dtensor import is_dtensor
from train.parallel import step
from train.parallel.agreement import everyone
from train.parallel.mesh import mesh_of, whole_groups
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
    mine, joined = dict[Any, int](), dict[Any, int]()
    for path, leaf in tree.flatten(state).items():
        shard = _shard_of(leaf)
        # Cloned, because numpy marks the memory that it shows as one that cannot be freed.
        local = (leaf if shard is None else leaf.to_local()).detach().cpu().flatten().clone()
        mine[path, shard] = zlib.crc32(local.view(torch.uint8).numpy()) if local.numel() else 0
        joined[shard] = zlib.crc32(f"{path}{mine[path, shard]}".encode(), joined.get(shard, 0))
    groups = whole_groups(devices)
    # Ranks have the same leaves, but for stages: one number for all of the same shards is enough.
    if mesh_of(devices).pp == 1 and not _clashing(everyone(joined, groups)):
        return []
    return sorted({path for path, _ in _clashing(everyone(mine, groups))})


def _shard_of(leaf: Any) -> tuple[int, ...] | None:
    """The rank's place along each mesh dimension that shards the leaf, -1 along others; None if it is no DTensor."""
    if not is_dtensor(leaf):
        return None
    coordinate = leaf.device_mesh.get_coordinate()
    return tuple(at if placement.is_shard() else -1 for at, placement in zip(coordinate, leaf.placements, strict=True))


def _clashing(of_ranks: list[dict[Any, int]]) -> set[Any]:
    seen: dict[Any, int] = {}
    return {key for held in of_ranks for key, bits in held.items() if seen.setdefault(key, bits) != bits}

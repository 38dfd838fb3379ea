"""Rows that a process has already, `Strategy(rows="own")`: what all must agree on before the first message of a step.

Of a whole batch every process sees whether it will do. Of others' rows it knows nothing: so each says what it was given
and what is wrong with it, in one message, and all go on or raise alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fnmodels import tree
from train.calls import Batch

from .mesh import mesh_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, order=True)
class Told:
    """What a process says: its number, which rows it should have, and of its microbatches the names, the number and a
    sum of what they are; or what is wrong with them."""

    rank: int
    row: int
    names: tuple[str, ...] = ()
    count: int = 0
    sum: int = 0
    wrong: str = ""


def agreed(
    given: Callable[[], Sequence[Batch]],
    cut: Callable[[Sequence[Batch]], list[Batch]],
    devices: DeviceMesh,
    row: int,
    groups: Sequence[Any],
) -> list[Batch]:
    """cut(given()), once all processes of `groups` have told that theirs will do. row: which rows this process has.

    ValueError in all of them where the functions of one raise it, where the microbatches are not equally many or have
    other entries, or where processes that share rows were given different ones.
    """
    parts: list[Batch] = []
    try:
        whole = given()
        parts = cut(whole)
        names = tuple(sorted({name for part in whole for name in tree.flatten(part)}))
        mine = Told(dist.get_rank(), row, names, len(whole), _sum(whole))
    except ValueError as error:
        mine = Told(dist.get_rank(), row, wrong=str(error))
    told = [mine]
    for group in groups:
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, told, group=group)
        told = [one for of_process in found for one in of_process]
    _check(sorted(told), str(mesh_of(devices)))
    return parts


def _check(told: Sequence[Told], mesh: str) -> None:
    first = told[0]
    for one in told:
        if one.wrong:
            raise ValueError(f"Process {one.rank}: {one.wrong}")
    for one in told:
        if one.count != first.count:
            raise ValueError(
                f"Process {first.rank} gives {first.count} microbatches and process {one.rank} {one.count}: layers are "
                "gathered for one after the other, so all must give equally many; one of padding alone adds nothing."
            )
        if one.names != first.names:
            raise ValueError(
                f"Process {first.rank} gives {', '.join(first.names)}, and process {one.rank} {', '.join(one.names)}: "
                "the microbatches of all must have the same entries."
            )
        same = next(other for other in told if other.row == one.row)
        if one.sum != same.sum:
            raise ValueError(
                f"Processes {same.rank} and {one.rank} share rows over the mesh {mesh}, differing in pp, cp or tp "
                "alone, and were given different microbatches."
            )


def _sum(parts: Sequence[Batch]) -> int:
    """Of shapes, and of the numbers that are whole: others may be computed, and differ in the last bit."""
    found = 0
    for part in parts:
        for path, tensor in sorted(tree.flatten(part).items()):
            found = zlib.crc32(f"{path}{list(tensor.shape)}".encode(), found)
            if not tensor.is_floating_point():
                found = zlib.crc32(_bytes(tensor), found)
    return found


def _bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()

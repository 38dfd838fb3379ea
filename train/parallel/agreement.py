"""Collective checks before a step: every rank was given the same batch, or batches that fit together.

A global batch is valid or invalid on all ranks alike, and one reduction of a checksum shows that it is the same on all.
With `Strategy(rows="own")` a rank cannot see the rows of the others, so each rank sends a `RankReport` of its own batch
and of any error. All ranks then continue, or all raise.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fnmodels import tree
from train.batch import Batches, Entries, check_entry
from train.comm.collectives import maximum

from .mesh import mesh_of, whole_groups

T = TypeVar("T")


def check_same(batch: Batches, devices: DeviceMesh, groups: Sequence[Any]) -> None:
    """Raises ValueError on all ranks of `groups` if they were not given the same batch, or list of batches."""
    ready_with_same(batch, lambda: None, devices, groups)


def ready_with_same(batch: Batches, prepare: Callable[[], T], devices: DeviceMesh, groups: Sequence[Any]) -> T:
    """prepare() once it has succeeded on all ranks of `groups`, and all were given the same batch, or list of batches.

    ValueError on all ranks otherwise, with one sentence. Each rank takes its shard, so batches that differ would mix
    silently. The check is one reduction of two integers; only after a fault do ranks exchange details. Only shapes are
    compared for floating-point tensors, which may be computed and differ in the last bit.
    """
    of_each: dict[tuple[str, str], int] | None = None
    failure: Exception | None = None
    try:
        parts: dict[Any, Any] = dict(enumerate(batch)) if isinstance(batch, (list, tuple)) else {"whole": batch}
        of_each = _checksums(parts)
        made = prepare()
    except Exception as error:  # raising here alone would leave the other ranks waiting
        failure = error
    if _is_same(-1 if failure or of_each is None else _sum(of_each), devices, groups):
        return made
    reports = sorted(everyone((dist.get_rank(), of_each, _words(failure)), groups), key=lambda one: one[0])
    read = [(rank, sums) for rank, sums, _ in reports if sums is not None]
    different = [(rank, sums) for rank, sums in read if sums != read[0][1]]
    if different:
        (first, its), (other, theirs) = read[0], different[0]
        names = {path for (_, path), _ in its.items() ^ theirs.items()}
        raise ValueError(
            f"Processes {first} and {other} were given different batches: their {' and '.join(sorted(names))} differ. "
            f"Over the mesh {mesh_of(devices)} each takes the full batch, the same in all, and computes its "
            'shard of it; for rows that each process has for itself pass Strategy(rows="own").'
        ) from failure
    _raise_fault(failure, [(rank, fault) for rank, _, fault in reports])
    raise AssertionError("Ranks differ, and none says in what.")


def _raise_fault(failure: Exception | None, faults: Sequence[tuple[int, str]]) -> None:
    """Raises, on all ranks, the fault of the first rank that has one; where all have the same, each its own error."""
    if failure is not None and len({fault for _, fault in faults}) == 1:
        raise failure
    for rank, fault in faults:
        if fault:
            raise ValueError(f"Process {rank}: {fault}") from failure


def _is_same(mine: int, devices: DeviceMesh, groups: Sequence[Any]) -> bool:
    """Whether this number is the same on all ranks, and at least 0."""
    ends = torch.tensor([mine, -mine], device=devices.device_type)
    for group in groups:
        ends = maximum(ends, group)
    high, low = ends.tolist()
    return bool(high == -low >= 0)


def all_ready(prepare: Callable[[], T], arguments: Mapping[str, Any], devices: DeviceMesh) -> T:
    """prepare() once it has succeeded on all ranks of the mesh, and all were given the same numbers as arguments.

    ValueError on all ranks otherwise; where all fail alike, each raises its own error. One reduction of two integers.
    """
    groups, numbers = whole_groups(devices), {name: _number(value) for name, value in arguments.items()}
    failure: Exception | None = None
    try:
        made = prepare()
    except Exception as error:  # raising here alone would leave the other ranks waiting
        failure = error
    if _is_same(-1 if failure else zlib.crc32(repr(sorted(numbers.items())).encode()), devices, groups):
        return made
    reports = sorted(everyone((dist.get_rank(), numbers, _words(failure)), groups), key=lambda one: one[0])
    _raise_fault(failure, [(rank, fault) for rank, _, fault in reports])
    first, its, _ = reports[0]
    other, theirs, _ = next(one for one in reports if one[1] != its)
    name = min(name for name in its.keys() | theirs.keys() if its.get(name) != theirs.get(name))
    raise ValueError(
        f"{name} is {its.get(name)} on process {first} and {theirs.get(name)} on process {other}; all ranks must give "
        "the same numbers."
    )


def _number(value: Any) -> Any:
    """The form of a value that ranks compare: numbers, also of 0-d tensors and in tuples; else the type alone."""
    if isinstance(value, (tuple, list)):
        return [_number(one) for one in value]
    if isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0):
        return float(value)
    return None if value is None else type(value).__name__


@dataclass(frozen=True, order=True)
class RankReport:
    """A rank's row shard, entries with kinds, number of microbatches and checksum, or the error."""

    rank: int
    row: int
    names: tuple[str, ...] = ()
    count: int = 0
    sum: int = 0
    wrong: str = ""


def agreed(
    given: Callable[[], Sequence[Entries]],
    cut: Callable[[Sequence[Entries]], list[Entries]],
    devices: DeviceMesh,
    row: int,
    groups: Sequence[Any],
) -> list[Entries]:
    """Returns cut(given()) once all ranks of `groups` have reported that theirs succeeded. row: this rank's row shard.

    ValueError on all ranks if either function raises on any of them, if the number or the entries of the microbatches
    differ, or if ranks that share rows were given different ones.
    """
    parts: list[Entries] = []
    try:
        whole = given()
        parts = cut(whole)
        names = tuple(sorted({_kind(name, x) for part in whole for name, x in tree.flatten(part).items()}))
        mine = RankReport(dist.get_rank(), row, names, len(whole), _sum(_checksums(dict(enumerate(whole)))))
    except Exception as error:  # any error: raising here alone would leave the other ranks waiting
        mine = RankReport(dist.get_rank(), row, wrong=_words(error))
    _check(sorted(everyone(mine, groups)), str(mesh_of(devices)))
    return parts


def _words(error: Exception | None) -> str:
    if error is None:
        return ""
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def _kind(name: str, x: Tensor) -> str:
    """Name, dtype and per-token shape of an entry: what a function of the batch may reject on one rank alone."""
    each = f" {list(x.shape[2:])} per token" if x.ndim > 2 else ""
    return f"{name} ({str(x.dtype).removeprefix('torch.')}{each})"


def everyone(mine: T, groups: Sequence[Any]) -> list[T]:
    """All-gathers one object per rank over `groups`, into one list."""
    gathered = [mine]
    for group in groups:
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, gathered, group=group)
        gathered = [one for of_process in found for one in of_process]
    return gathered


def _check(reports: Sequence[RankReport], mesh: str) -> None:
    first = reports[0]
    for one in reports:
        if one.wrong:
            raise ValueError(f"Process {one.rank}: {one.wrong}")
    for one in reports:
        if one.count != first.count:
            raise ValueError(
                f"Process {first.rank} gives {first.count} microbatches and process {one.rank} {one.count}: layers are "
                "gathered for one after the other, so all must give equally many; one of padding alone adds nothing."
            )
        if one.names != first.names:
            raise ValueError(
                f"Process {first.rank} gives {', '.join(first.names)}, and process {one.rank} {', '.join(one.names)}: "
                "the microbatches of all must have the same entries, of the same kinds."
            )
        same = next(other for other in reports if other.row == one.row)
        if one.sum != same.sum:
            raise ValueError(
                f"Processes {same.rank} and {one.rank} share rows over the mesh {mesh}, differing in pp, cp or tp "
                "alone, and were given different microbatches."
            )


def _sum(checksums: Mapping[tuple[str, str], int]) -> int:
    return zlib.crc32(repr(sorted(checksums.items())).encode())


def _checksums(parts: Mapping[Any, Entries]) -> dict[tuple[str, str], int]:
    """{(name of a batch, path in it): checksum of the shape and the elements}; floats may differ in the last bit."""
    return {(str(n), path): _checksum(path, x) for n, part in parts.items() for path, x in tree.flatten(part).items()}


def _checksum(path: str, tensor: Tensor) -> int:
    check_entry(path, tensor)
    of_shape = zlib.crc32(f"{path}{list(tensor.shape)}".encode())
    if tensor.is_floating_point():
        return of_shape
    elements: Any = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy()  # not copied if it is on the CPU
    return zlib.crc32(elements, of_shape)

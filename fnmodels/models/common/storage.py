"""How parameters lie in a checkpoint's files where that is not one tensor each under a name of its own.

A family's `hf_names` gives, for every path, the name of a tensor that is the parameter, or a `Part` of one: fused
projections are split on loading and joined on saving. Taking a part of a mapped file copies nothing where the rows are
contiguous or the tensor is transposed. Experts are one parameter [E, ...]; on disk they are parts of a tensor that
holds all of them too, or a `Stack` of tensors, one for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Rows start <= i < stop of each of `groups` equal blocks of rows of the tensor `name`, [out, in] or [out].

    rows: how many rows the whole tensor has. transposed: on disk it is [in, out] (a bias is the same either way).
    batched: this holds for every expert of [E, out, in] or [E, out]. Rows of two projections that take turns are
    groups: of 2 F rows the even ones are rows 0 <= i < 1 of F groups.
    """

    name: str
    start: int
    stop: int
    rows: int
    groups: int = 1
    transposed: bool = False
    batched: bool = False

    def __post_init__(self) -> None:
        if self.rows % self.groups or not 0 <= self.start < self.stop <= self.rows // self.groups:
            raise ValueError(f"{self} does not lie in its tensor.")


Single = str | Part


@dataclass(frozen=True)
class Stack:
    """Tensors of one shape and dtype, or parts of such, that are the parameter [E, ...] one after the other."""

    parts: tuple[Single, ...]

    def __post_init__(self) -> None:
        if not self.parts:
            raise ValueError("A Stack needs at least one part.")


Stored = Single | Stack


def disk_name(stored: Single) -> str:
    """The name of the tensor in the file."""
    return stored if isinstance(stored, str) else stored.name


def disk_names(stored: Stored) -> tuple[str, ...]:
    """The names of the tensors in the files that the parameter is made of."""
    return tuple(disk_name(single) for single in (stored.parts if isinstance(stored, Stack) else (stored,)))


def disk_shape(stored: Single, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor in the file, given that of the parameter."""
    if isinstance(stored, str):
        return shape
    experts, inner = (shape[:1], shape[2:]) if stored.batched else ((), shape[1:])
    return (*experts, *inner, stored.rows) if stored.transposed else (*experts, stored.rows, *inner)


def take(stored: Single, tensor: Tensor) -> Tensor:
    """The parameter, from the tensor in the file; a view of it wherever that is possible and of use.

    (Rows that take turns in a transposed tensor would be a view without neighbors, which every product has to copy.)
    """
    if isinstance(stored, str):
        return tensor
    axis, rows = _rows(stored, tensor)
    part = rows.flatten(axis, axis + 1)
    return part if 1 in part.stride() else part.contiguous()


def take_into(out: Tensor, stored: Single, tensor: Tensor, skip: int = 0) -> None:
    """`take` into memory that is there, cast to its dtype; of a parameter with more rows, those from `skip` on."""
    if isinstance(stored, str):
        out.copy_(tensor)
        return
    axis, rows = _rows(stored, tensor)
    if out.shape[axis] == stored.groups * rows.shape[axis + 1]:
        out.unflatten(axis, (stored.groups, -1)).copy_(rows)
    else:
        out.copy_(rows.flatten(axis, axis + 1).narrow(axis, skip, out.shape[axis]))


@dataclass(frozen=True)
class Cut:
    """Where a part of a parameter is in the tensor of the file.

    box: slices of that tensor. stored: how the part lies in what they hold; the name alone where it is that. skip: what
    lies there before it, rows of a group that is cut.
    """

    box: tuple[slice, ...]
    stored: Single
    skip: int = 0


def cut(stored: Single, part: tuple[slice, ...]) -> Cut:
    """Of a parameter, the part (a slice of each dimension, none of them empty)."""
    if isinstance(stored, str):
        return Cut(part, stored)
    axis = 1 if stored.batched else 0
    lead, rows, inner = part[:axis], part[axis], part[axis + 1 :]
    if stored.groups == 1:
        there, skip = slice(stored.start + rows.start, stored.start + rows.stop), 0
        count = rows.stop - rows.start
        within: Single = replace(stored, start=0, stop=count, rows=count)
    else:
        size, turn = stored.stop - stored.start, stored.rows // stored.groups
        first, last = rows.start // size, -(-rows.stop // size)
        there, skip = slice(first * turn, last * turn), rows.start - first * size
        within = replace(stored, rows=(last - first) * turn, groups=last - first)
    if stored.transposed and inner:
        return Cut((*lead, *inner, there), within, skip)
    return Cut((*lead, there, *inner), stored.name if stored.groups == 1 else within, skip)


def join(parts: Iterable[tuple[Single, Tensor]]) -> Tensor:
    """The tensor in the file, from all the parameters that are parts of it: the inverse of `take`."""
    parts = list(parts)
    first, value = parts[0]
    if isinstance(first, str):
        return value
    out = torch.empty(disk_shape(first, tuple(value.shape)), dtype=value.dtype, device=value.device)
    for part, value in parts:
        assert isinstance(part, Part)
        axis, rows = _rows(part, out)
        rows.copy_(value.unflatten(axis, (part.groups, -1)))
    return out


def gather(stored: Stored, tensors: Mapping[str, Tensor]) -> Tensor:
    """The parameter, from all tensors of the files by name: `take`, and for a Stack a copy."""
    if isinstance(stored, Stack):
        return torch.stack([take(single, tensors[disk_name(single)]) for single in stored.parts])
    return take(stored, tensors[disk_name(stored)])


def fuse(name: str, rows: Mapping[str, int]) -> dict[str, Part]:
    """{path: Part} of parameters that lie one after the other in the tensor `name`. rows: {path: how many it has}."""
    starts, total = itertools.accumulate(rows.values(), initial=0), sum(rows.values())
    return {path: Part(name, start, start + n, total) for start, (path, n) in zip(starts, rows.items(), strict=False)}


def covers(parts: Iterable[Single]) -> bool:
    """Whether the parts of one tensor fill it, each row once."""
    parts = list(parts)
    if isinstance(parts[0], str):
        return len(parts) == 1
    end = 0
    for part in sorted((p for p in parts if isinstance(p, Part)), key=lambda p: p.start):
        if part.start != end:
            return False
        end = part.stop
    return end * parts[0].groups == parts[0].rows


def _rows(stored: Part, tensor: Tensor) -> tuple[int, Tensor]:
    """(axis, its rows [(E,) groups, rows of a group, (in)] with `axis` that of the groups), a view of the whole."""
    axis = 1 if stored.batched else 0
    rows = tensor.mT if stored.transposed and tensor.ndim > axis + 1 else tensor
    blocks = rows.unflatten(axis, (stored.groups, -1))
    return axis, blocks.narrow(axis + 1, stored.start, stored.stop - stored.start)

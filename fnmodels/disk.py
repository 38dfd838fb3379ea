"""How parameters lie in a checkpoint's files where that is not one tensor each under a name of its own.

A family's `hf_names` gives, for every path, the name of a tensor that is the parameter, or a `Part` of one: fused
projections are split on loading and joined on saving. Taking a part of a mapped file copies nothing where the rows are
contiguous or the tensor is transposed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Rows start <= i < stop of each of `groups` equal blocks of rows of the tensor `name`, [out, in] or [out].

    rows: how many rows the whole tensor has. transposed: on disk it is [in, out] (a bias is the same either way).
    """

    name: str
    start: int
    stop: int
    rows: int
    groups: int = 1
    transposed: bool = False

    def __post_init__(self) -> None:
        if self.rows % self.groups or not 0 <= self.start < self.stop <= self.rows // self.groups:
            raise ValueError(f"{self} does not lie in its tensor.")


Stored = str | Part


def disk_name(stored: Stored) -> str:
    """The name of the tensor in the file."""
    return stored if isinstance(stored, str) else stored.name


def disk_shape(stored: Stored, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor in the file, given that of the parameter."""
    if isinstance(stored, str):
        return shape
    whole = (stored.rows, *shape[1:])
    return whole[::-1] if stored.transposed else whole


def take(stored: Stored, tensor: Tensor) -> Tensor:
    """The parameter, from the tensor in the file; a view of it wherever that is possible."""
    if isinstance(stored, str):
        return tensor
    rows = _rows(stored, tensor)
    return rows.unflatten(0, (stored.groups, -1))[:, stored.start : stored.stop].flatten(0, 1)


def join(parts: Iterable[tuple[Stored, Tensor]]) -> Tensor:
    """The tensor in the file, from all the parameters that are parts of it: the inverse of `take`."""
    parts = list(parts)
    first, value = parts[0]
    if isinstance(first, str):
        return value
    out = torch.empty(disk_shape(first, tuple(value.shape)), dtype=value.dtype, device=value.device)
    blocks = _rows(first, out).unflatten(0, (first.groups, -1))
    for part, value in parts:
        assert isinstance(part, Part)
        blocks[:, part.start : part.stop] = value.unflatten(0, (first.groups, -1))
    return out


def fuse(name: str, rows: Mapping[str, int]) -> dict[str, Part]:
    """{path: Part} of parameters that lie one after the other in the tensor `name`. rows: {path: how many it has}."""
    starts, total = itertools.accumulate(rows.values(), initial=0), sum(rows.values())
    return {path: Part(name, start, start + n, total) for start, (path, n) in zip(starts, rows.items(), strict=False)}


def covers(parts: Iterable[Stored]) -> bool:
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


def _rows(stored: Part, tensor: Tensor) -> Tensor:
    return tensor.mT if stored.transposed and tensor.ndim > 1 else tensor

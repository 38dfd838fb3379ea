"""On-disk layout of parameters that are not one tensor each: slices of fused tensors and stacks of expert tensors.

A family's `hf_names` maps every parameter path to the name of the tensor that holds it, or to a `TensorSlice` of one:
fused projections are split on loading and joined on saving. Slicing a mapped file copies nothing where the rows are
contiguous or the tensor is transposed. Experts are one parameter [E, ...]; on disk they are slices of one tensor that
holds all of them, or a `Stack` of one tensor per expert. A `Stack` may also be of a large table's rows.
"""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

StoredNames = dict[str, Any]  # path of a parameter -> the name of its tensor, a `TensorSlice` or a `Stack`


@dataclass(frozen=True)
class TensorSlice:
    """Rows start <= i < stop of each of `groups` equal blocks of rows of the tensor `name`, [out, in] or [out].

    rows: number of rows of the full tensor. transposed: on disk it is [in, out] (no effect on a bias).
    batched: the tensor is [E, out, in] or [E, out], and the slice is taken from every expert. Interleaved rows of two
    projections are groups: the even ones of 2 F rows are rows 0 <= i < 1 of F groups. ones (a, b): the
    parameter is a vector [rows], and on disk it has a dimensions of size 1 before and b after. columns: the slice is of
    the columns of a tensor [out, rows] instead, in one group; and transposed: of rows of a tensor [rows, out], which is
    upside down in files, as DBRX's second matrices of experts. experts: on disk it is int64, of numbers of so many
    experts, from 0 on; the parameter is floating, so that it may stand in a tree of which gradients are taken. 0: it is
    floating on disk too. halves: rows 2 i and 2 i + 1 of a group of 2 d rows are rows i and d + i there, the order in
    which transformers' modules rotate the halves of a head; of tensors in memory alone.
    """

    name: str
    start: int
    stop: int
    rows: int
    groups: int = 1
    transposed: bool = False
    batched: bool = False
    ones: tuple[int, int] | None = None
    columns: bool = False
    experts: int = 0
    halves: bool = False

    def __post_init__(self) -> None:
        if self.rows % self.groups or not 0 <= self.start < self.stop <= self.rows // self.groups:
            raise ValueError(f"{self} does not lie in its tensor.")


Single = str | TensorSlice


@dataclass(frozen=True)
class Stack:
    """Tensors of one dtype (or slices of them) that, stacked in this order, form the parameter [E, ...].

    rows: the numbers of rows of tensors that are concatenated instead; (): the tensors have one shape and are stacked.
    """

    tensors: tuple[Single, ...]
    rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("A Stack needs at least one tensor.")
        if self.rows and len(self.rows) != len(self.tensors):
            raise ValueError(f"A Stack of {len(self.tensors)} tensors has {len(self.rows)} numbers of rows.")

    @property
    def entries(self) -> int:
        """The size of the parameter's first dimension."""
        return sum(self.rows) if self.rows else len(self.tensors)

    def places(self, box: slice) -> list[tuple[Single, slice, slice]]:
        """(tensor, its entries, where they go in the box) of each tensor in the entries `box` of the parameter."""
        found, start = [], 0
        for single, count in zip(self.tensors, self.rows or (1,) * len(self.tensors), strict=True):
            low, high = max(box.start, start), min(box.stop, start + count)
            if low < high:
                found.append((single, slice(low - start, high - start), slice(low - box.start, high - box.start)))
            start += count
        return found


Stored = Single | Stack


def disk_name(stored: Single) -> str:
    """The name of the tensor in the file."""
    return stored if isinstance(stored, str) else stored.name


def renamed(stored: Stored, pattern: str, new: str) -> Stored:
    """The same with names in which the part that matches `pattern` is `new`."""
    if isinstance(stored, Stack):
        return replace(stored, tensors=tuple(_renamed(single, pattern, new) for single in stored.tensors))
    return _renamed(stored, pattern, new)


def renamed_parts(stored: Stored, parts: Mapping[str, str]) -> Stored:
    """The same with names whose parts between dots are replaced: {part: new part}."""
    if isinstance(stored, Stack):
        return replace(stored, tensors=tuple(_with_parts(single, parts) for single in stored.tensors))
    return _with_parts(stored, parts)


def _with_parts(single: Single, parts: Mapping[str, str]) -> Single:
    name = ".".join(parts.get(part, part) for part in disk_name(single).split("."))
    return name if isinstance(single, str) else replace(single, name=name)


def _renamed(single: Single, pattern: str, new: str) -> Single:
    name = re.sub(pattern, new, disk_name(single), count=1)
    return name if isinstance(single, str) else replace(single, name=name)


def disk_names(stored: Stored) -> tuple[str, ...]:
    """The names of all tensors in the files that hold the parameter."""
    return tuple(disk_name(single) for single in (stored.tensors if isinstance(stored, Stack) else (stored,)))


def disk_shape(stored: Single, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the tensor in the file, given that of the parameter."""
    if isinstance(stored, str):
        return shape
    if stored.ones:
        return (*(1,) * stored.ones[0], stored.rows, *(1,) * stored.ones[1])
    if stored.columns:
        return (stored.rows, shape[0]) if stored.transposed else (shape[0], stored.rows)
    experts, inner = (shape[:1], shape[2:]) if stored.batched else ((), shape[1:])
    return (*experts, *inner, stored.rows) if stored.transposed else (*experts, stored.rows, *inner)


def extract(stored: Single, tensor: Tensor) -> Tensor:
    """The parameter, extracted from the tensor in the file; a view where one with a unit stride exists, else a copy.

    Interleaved rows of a transposed tensor would be a view without unit stride, which every matmul would copy.
    """
    if isinstance(stored, str):
        return tensor
    axis, rows = _rows(stored, tensor)
    value = rows.flatten(axis, axis + 2) if stored.halves else rows.flatten(axis, axis + 1)
    value = value.mT if stored.columns else value
    value = value.to(torch.float32) if stored.experts else value
    return value if 1 in value.stride() else value.contiguous()


def extract_into(out: Tensor, stored: Single, tensor: Tensor, skip: int = 0) -> None:
    """`extract` into existing memory, cast to its dtype; where `out` has fewer rows, those from `skip` on."""
    if isinstance(stored, str):
        out.copy_(tensor)
        return
    axis, rows = _rows(stored, tensor)
    out = out.mT if stored.columns else out
    if out.shape[axis] == stored.groups * rows.shape[axis + 1]:
        out.unflatten(axis, (stored.groups, -1)).copy_(rows)
    else:
        out.copy_(rows.flatten(axis, axis + 1).narrow(axis, skip, out.shape[axis]))


@dataclass(frozen=True)
class DiskRegion:
    """The region of a tensor in a file that holds a shard of a parameter.

    box: slices of that tensor to read. stored: how the shard lies in the values read (the name alone: it is all of
    them). skip: rows to skip before the shard, where it begins inside a group.
    """

    box: tuple[slice, ...]
    stored: Single
    skip: int = 0


def disk_region(stored: Single, shard: tuple[slice, ...]) -> DiskRegion:
    """The region of the file's tensor that holds a shard of the parameter: one non-empty slice per dimension."""
    if isinstance(stored, str):
        return DiskRegion(shard, stored)
    if stored.halves:
        raise ValueError(f"{stored.name} is a tensor in memory, of which no file has a region.")
    if stored.columns:
        there = slice(stored.start + shard[1].start, stored.start + shard[1].stop)
        if stored.transposed:
            count = shard[1].stop - shard[1].start
            return DiskRegion((there, shard[0]), replace(stored, start=0, stop=count, rows=count))
        return DiskRegion((shard[0], there), stored.name)
    axis = 1 if stored.batched else 0
    lead, rows, inner = shard[:axis], shard[axis], shard[axis + 1 :]
    if stored.groups == 1:
        there, skip = slice(stored.start + rows.start, stored.start + rows.stop), 0
        count = rows.stop - rows.start
        within: Single = replace(stored, start=0, stop=count, rows=count)
    else:
        size, group = stored.stop - stored.start, stored.rows // stored.groups
        first, last = rows.start // size, -(-rows.stop // size)
        there, skip = slice(first * group, last * group), rows.start - first * size
        within = replace(stored, rows=(last - first) * group, groups=last - first)
    if stored.ones:
        before, after = ((slice(0, 1),) * count for count in stored.ones)
        return DiskRegion((*before, there, *after), within, skip)
    if stored.transposed and inner:
        return DiskRegion((*lead, *inner, there), within, skip)
    return DiskRegion((*lead, there, *inner), stored.name if stored.groups == 1 else within, skip)


def join(slices: Iterable[tuple[Single, Tensor]]) -> Tensor:
    """The tensor in the file, joined from all the parameters that are slices of it: the inverse of `extract`.

    Rows of no parameter are zeros (of a head, up to a rounder number of tokens; of decays, of heads).
    """
    slices = list(slices)
    first, value = slices[0]
    if isinstance(first, str):
        return value
    make = torch.empty if covers(piece for piece, _ in slices) else torch.zeros
    out = make(disk_shape(first, tuple(value.shape)), dtype=value.dtype, device=value.device)
    for piece, value in slices:
        assert isinstance(piece, TensorSlice)
        axis, rows = _rows(piece, out)
        value = value.mT if piece.columns else value
        rows.copy_(value.unflatten(axis, (piece.groups, -1, 2) if piece.halves else (piece.groups, -1)))
    return out


def extract_parameter(stored: Stored, tensors: Mapping[str, Tensor]) -> Tensor:
    """The parameter, from all tensors of the files by name: `extract`, for a Stack of each, then joined (a copy)."""
    if isinstance(stored, Stack):
        values = [extract(single, tensors[disk_name(single)]) for single in stored.tensors]
        return torch.cat(values) if stored.rows else torch.stack(values)
    return extract(stored, tensors[disk_name(stored)])


def fuse(name: str, rows: Mapping[str, int], *, groups: int = 1) -> dict[str, TensorSlice]:
    """{path: TensorSlice} of parameters that are concatenated along rows in the tensor `name`; rows: {path: count}.

    groups: the tensor is this many blocks, each a concatenation of equal shares of the parameters' rows.
    """
    starts, total = itertools.accumulate((n // groups for n in rows.values()), initial=0), sum(rows.values())
    return {
        path: TensorSlice(name, start, start + n // groups, total, groups=groups)
        for start, (path, n) in zip(starts, rows.items(), strict=False)
    }


def covers(slices: Iterable[Single]) -> bool:
    """Whether the slices of one tensor cover each of its rows exactly once."""
    slices = list(slices)
    if isinstance(slices[0], str):
        return len(slices) == 1
    end = 0
    for piece in sorted((p for p in slices if isinstance(p, TensorSlice)), key=lambda p: p.start):
        if piece.start != end:
            return False
        end = piece.stop
    return end * slices[0].groups == slices[0].rows


def _rows(stored: TensorSlice, tensor: Tensor) -> tuple[int, Tensor]:
    """(axis of the groups, a view [(E,) groups, rows of the slice per group, (in)] of the file's tensor).

    Of `halves` a view [groups, d, 2, (in)].
    """
    axis = 1 if stored.batched else 0
    tensor = tensor.view(-1) if stored.ones else tensor
    rows = tensor.mT if stored.columns != (stored.transposed and tensor.ndim > axis + 1) else tensor
    blocks = rows.unflatten(axis, (stored.groups, -1))
    blocks = blocks.narrow(axis + 1, stored.start, stored.stop - stored.start)
    return axis, blocks.unflatten(axis + 1, (2, -1)).transpose(axis + 1, axis + 2) if stored.halves else blocks


def separate_heads(config: Any, layers: str, module: str) -> StoredNames:
    """{path: its place} of q, k and v in modules of transformers that rotate halves of heads; files fuse them.

    Args:
        config: with num_hidden_layers, num_attention_heads and head_dim.
        layers: what names have before the number of a layer.
        module: behind it, before q_proj.
    """
    heads, size = config.num_attention_heads, config.head_dim
    found: StoredNames = {}
    for i in range(config.num_hidden_layers):
        for q in "qkv":
            for ours, theirs in (("proj", "weight"), ("bias", "bias")):
                name = f"{layers}{i}{module}{q}_proj.{theirs}"
                turned = TensorSlice(name, 0, size, heads * size, groups=heads, halves=True)
                found[f"layers.{i}.attention.{q}_{ours}"] = name if q == "v" else turned
    return found

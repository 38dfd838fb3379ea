"""Kept weights over a mesh: how the parts of a weight are sharded where a plan shards the weight.

Tensor and expert parallelism compute with shards, so each has all entries of its elements: a shard that begins inside
of a word, a block or a group is refused. Other mesh dimensions (fsdp) are gathered before the weight is used: they
shard the stored entries, wherever these divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from params.axes import AXES
from params.sharding import Sharding

from .form import EACH, Axis, Form, Part
from .kept import TensorReader

Parts = tuple[Tensor | None, ...]
COMPUTED = frozenset(axis.mesh for axis in AXES.values() if axis.mesh)  # the mesh dimensions of which shards compute


def splits(sharding: Sharding) -> list[tuple[int, str, int, int]]:
    """(position, name, size, dimension of the weight) of the mesh dimensions of which shards compute."""
    each = enumerate(zip(sharding.sizes, sharding.dims, strict=True))
    return [(i, name, n, dim) for i, ((name, n), dim) in each if dim is not None and n > 1 and name in COMPUTED]


def by_rows(form: Form, parts: Parts, shape: tuple[int, int]) -> tuple[Form, Parts]:
    """The same weight with codes [rows, ..] where they lie over all elements in a row and no block crosses a row.

    Scales that are quantized in blocks of their own are dequantized.
    """
    axes = [part.columns for part in (form.codes, form.scales) if part is not None]
    if form.width >= 0 or any(shape[1] % max(axis.elements, 1) for axis in axes):
        return form, parts
    if isinstance(form.scales, Form):
        nested, ending = form.scales, form.scales.codes.ending
        named = {part.ending: tensor for (part, _, _), tensor in zip(form.parts(), parts, strict=True)}
        scales = nested.aligned(TensorReader(named), slice(0, 1), slice(0, shape[0] * shape[1]))
        form = replace(form, scales=Part(ending, (scales.dtype,), EACH, nested.columns))
        parts = tuple({**named, ending: scales}[part.ending] for part, _, _ in form.parts())
    turned = tuple(
        tensor.reshape(shape[0], -1) if tensor is not None and part.columns.elements else tensor
        for (part, _, _), tensor in zip(form.parts(), parts, strict=True)
    )
    return replace(form, width=0), turned


def part_shardings(
    form: Form, parts: Parts, shape: tuple[int, ...], sharding: Sharding, path: str
) -> list[Sharding | None]:
    """The sharding of each part of a weight [.., out, in] with this sharding; None for parts that it does not have.

    parts: of one matrix, [rows, columns] as they are stored. ValueError names the leaf, the mesh dimension and the
    block that a shard would cut.
    """
    shardings: list[Sharding | None] = []
    for (part, rows, columns), tensor in zip(form.parts(), parts, strict=True):
        if tensor is None:
            shardings.append(None)
            continue
        lead, full = len(shape) - 2, (*shape[:-2], *tensor.shape)
        dims: list[int | None] = [None] * len(sharding.sizes)
        left = list(shape)
        for position, name, count, dim in splits(sharding):
            left[dim] //= count
            axes = (EACH,) if dim < lead else (rows, columns)[dim - lead]
            if dim >= lead:
                _check_whole(form, axes, left[dim], f"{path}: {name!r} shards dimension {dim} of {list(shape)}")
            if all(axis.elements for axis in axes):
                dims[position] = dim if dim < lead or not part.inputs_first else 2 * lead + 1 - dim
        for position, (_, count) in enumerate(sharding.sizes):
            spread = sharding.sizes[position][0] not in COMPUTED and count > 1
            free = [d for d, n in enumerate(full) if d not in dims and n % count == 0] if spread else []
            dims[position] = free[0] if free else dims[position]
        shardings.append(Sharding(tuple(dims), sharding.sizes, full, tensor.dtype.itemsize, sharding.mesh))
    return shardings


def _check_whole(form: Form, axes: Sequence[Axis], size: int, what: str) -> None:
    """ValueError unless shards of `size` elements begin between entries of a part."""
    advice = "leave that axis out of the rules, or load the model without keep_quantized."
    if form.is_flat:
        raise ValueError(f"{what}, and blocks of {form.name} lie across its rows: {advice}")
    for axis in axes:
        if axis.elements == 0:
            return
        if size % axis.elements:
            raise ValueError(
                f"{what} into parts of {size}, which cuts blocks or words of {axis.elements} of {form.name}: {advice}"
            )
        size = axis.count(size)

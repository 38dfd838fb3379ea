"""Leaves kept as their files store them: read in full, or this process' shards of their parts by a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fnmodels.models.common.storage import Single, Stack, Stored, TensorSlice, disk_name
from params.io.safetensors_file import Box, read_tensor
from params.sharding import Sharding

from .form import Axis, Part, Region
from .kept import KeptWeight, Origin
from .shards import Parts, by_rows, part_shardings, splits
from .weight import FileReader, Found, QuantizedWeight, matrices

Matrix = tuple[Single, QuantizedWeight]  # which rows of one weight [out, in] in the files


@dataclass(frozen=True)
class Target:
    """A leaf that is to be kept, with its dtype and its place.

    path: of the leaf. dtype: that it is dequantized to, None for the method's. sharding: that of the leaf by a plan.
    """

    path: str
    dtype: torch.dtype | None
    device: torch.device
    sharding: Sharding | None = None


def keep(stored: Stored, shape: tuple[int, ...], found: Found, target: Target, buffer: Tensor) -> KeptWeight | None:
    """The leaf `stored` as the files have it; None where it is not quantized, or lies across their words or blocks.

    With a sharding its parts are DTensors, of which this process reads its shards.

    Raises:
        MismatchError: scales and groups that no quantizer writes.
        ValueError: a shard would begin inside of a word or a block.
    """
    singles = stored.tensors if isinstance(stored, Stack) else (stored,)
    located = [(single, found[disk_name(single)][1]) for single in singles]
    weights = [weight for _, weight in located if isinstance(weight, QuantizedWeight)]
    if len(weights) < len(singles) or (target.sharding is not None and _is_sharded_head(target)):
        return None
    each = [pair for single, weight in zip(singles, weights, strict=True) for pair in _matrices(single, weight)]
    sizes = _read(each[0][0], _Headers(each[0][1], buffer))
    if sizes is None or len({_layout(*pair) for pair in each}) > 1:
        return None
    if target.sharding is not None:
        return _sharded(each, sizes, shape, target, buffer)
    parts = [_present(_read(single, FileReader(weight, buffer))) for single, weight in each]
    joined = _stack(parts) if len(shape) > 2 else parts[0]
    moved = tuple(None if part is None else part.to(target.device) for part in joined)
    form, dtype = weights[0].form, target.dtype or weights[0].dtype
    return KeptWeight(
        moved, tuple(_beside(weight, buffer) for weight in weights), form, shape, dtype, _origin(weights[0])
    )


def _sharded(
    each: Sequence[Matrix], sizes: Parts, shape: tuple[int, ...], target: Target, buffer: Tensor
) -> KeptWeight:
    """The weight of these matrices as DTensors. sizes: one's parts, without values."""
    (single, weight), how = each[0], target.sharding
    assert how is not None
    computed = splits(how)
    as_rows = bool(computed) and weight.form.width < 0
    form, sizes = by_rows(weight.form, sizes, (shape[-2], shape[-1])) if as_rows else (weight.form, sizes)
    by_columns = any(dim == len(shape) - 1 for *_, dim in computed)
    if by_columns and form.index is not None:
        sizes = tuple(
            None if part is form.index else size for (part, _, _), size in zip(form.parts(), sizes, strict=True)
        )
    shardings = part_shardings(form, sizes, shape, how, target.path)
    boxes = [None if sharding is None else sharding.local_box() for sharding in shardings]
    direct = not as_rows and _cut_of(single, weight) is None

    def local(single: Single, weight: QuantizedWeight) -> Parts:
        reader = FileReader(weight, buffer)
        if (
            by_columns
            and form.index is not None
            and reader.has(form.index)
            and not form.is_even(reader, slice(0, shape[-1]))
        ):
            raise ValueError(
                f"{target.path}: the inputs of {weight.name} are in groups by activation order (g_idx), which shards "
                "of columns cut: leave that axis out of the rules, or load the model without keep_quantized."
            )
        parts = _present(_read(single, reader, [box and box[-2:] for box in boxes] if direct else None))
        if direct:
            return parts
        parts = by_rows(weight.form, parts, (shape[-2], shape[-1]))[1] if as_rows else parts
        return tuple(
            None if part is None or box is None else part[box[-2:]].contiguous()
            for part, box in zip(parts, boxes, strict=True)
        )

    if len(shape) == 2:
        shards = local(single, weight)
    else:
        ranges = [range(0) if box is None else range(box[0].start, box[0].stop) for box in boxes]
        read = {index: local(*each[index]) for index in sorted(set().union(*ranges))}
        shards = tuple(
            _stacked([read[index][n] for index in chosen]) if chosen else None for n, chosen in enumerate(ranges)
        )
    placed = tuple(
        None if shard is None or sharding is None else sharding.distribute(shard.to(target.device))
        for shard, sharding in zip(shards, shardings, strict=True)
    )
    return KeptWeight(placed, (), form, shape, target.dtype or weight.dtype)


def _is_sharded_head(target: Target) -> bool:
    """Whether it is a head whose vocabulary is sharded, with which losses compute in their own way."""
    return target.path.endswith("lm_head") and target.sharding is not None and bool(splits(target.sharding))


def _matrices(single: Single, weight: QuantizedWeight) -> list[Matrix]:
    """The weight of each expert, or the weight itself."""
    if len(weight.shape) == 2:
        return [(single, weight)]
    inner = single if isinstance(single, str) else replace(single, batched=False)
    return [pair for matrix in matrices(weight) for pair in _matrices(inner, matrix)]


def _layout(single: Single, weight: QuantizedWeight) -> tuple[object, ...]:
    """The layout of a weight, which all weights that are stacked share."""
    sizes = tuple((ending, entry.shape, entry.dtype) for ending, (_, entry) in sorted(weight.parts.items()))
    return weight.form, sizes, tuple(weight.beside), None if isinstance(single, str) else replace(single, name="")


def _present(parts: Parts | None) -> Parts:
    assert parts is not None  # which headers decide
    return parts


def _stack(each: Sequence[Parts]) -> Parts:
    return tuple(_stacked(column) for column in zip(*each, strict=True))


def _stacked(column: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [tensor for tensor in column if tensor is not None]
    return torch.stack(tensors) if tensors else None


def _origin(weight: QuantizedWeight) -> Origin:
    stem = weight.stem.removeprefix(weight.module)
    return Origin(
        weight.declaration,
        tuple((stem + ending, shape) for ending, shape in weight.shapes.items()),
        tuple(weight.beside),
    )


def _beside(weight: QuantizedWeight, buffer: Tensor) -> tuple[Tensor, ...]:
    return tuple(read_tensor(file, entry, None, buffer) for file, entry in weight.beside.values())


class _Headers(FileReader):
    """The parts of a weight without their values."""

    def read(self, part: Part, region: Region) -> Tensor:
        located = self.weight.parts.get(part.ending)
        size = [extent.stop - extent.start for extent in region]
        return torch.empty(size, dtype=torch.float32 if located is None else located[1].dtype, device="meta")


def _cut_of(single: Single, weight: QuantizedWeight) -> TensorSlice | None:
    """The slice of the weight's rows, None for all of them."""
    fused = single if isinstance(single, TensorSlice) else None
    return fused if fused is not None and (fused.start, fused.stop) != (0, weight.matrix_shape[0]) else None


def _read(single: Single, reader: FileReader, boxes: Sequence[Box | None] | None = None) -> Parts | None:
    """The parts of the rows that a leaf is of a weight, checked; None where they cannot be cut out.

    boxes: of each part, as it is stored, what is read; None for everything.
    """
    weight, fused = reader.weight, single if isinstance(single, TensorSlice) else None
    if (fused is not None and fused.transposed) != weight.form.turned or (fused and (fused.columns or fused.ones)):
        return None
    cut, headers = _cut_of(single, weight), isinstance(reader, _Headers)
    if cut is not None and weight.form.width:
        return None
    parts: list[Tensor | None] = []
    for index, (part, row_axes, _) in enumerate(weight.form.parts()):
        box = _everything(reader, part) if boxes is None else boxes[index]
        if not reader.has(part) or box is None:
            parts.append(None)
            continue
        tensor = reader.read(part, (box[1], box[0]) if part.inputs_first else (box[0], box[1]))
        if not headers and part.check and (fault := part.fault(part.decode(tensor))):
            reader.refuse(part, fault)
        rows = tensor if cut is None else _rows(tensor, row_axes, cut, weight.matrix_shape[0])
        if rows is None:
            return None
        parts.append((rows.mT if part.inputs_first else rows).contiguous())
    if not headers and weight.form.index is not None and reader.has(weight.form.index):
        weight.form.groups_of(reader, slice(0, weight.matrix_shape[1]))  # refuses those that do not exist
    return tuple(parts)


def _everything(reader: FileReader, part: Part) -> Box:
    """All of a part, as it is stored; nothing where the weight does not have it."""
    if part.ending not in reader.weight.parts:
        return slice(0, 1), slice(0, 1)
    rows, columns = reader.weight.parts[part.ending][1].shape
    return slice(0, rows), slice(0, columns)


def _rows(part: Tensor, axes: tuple[Axis, ...], cut: TensorSlice, total: int) -> Tensor | None:
    """The entries of a part for the rows of a slice; None where they hold other rows too."""
    if any(axis.elements == 0 for axis in axes):
        return part
    if all(axis == Axis() for axis in axes):
        return part.unflatten(0, (cut.groups, -1))[:, cut.start : cut.stop].flatten(0, 1)
    (axis,) = (axis for axis in axes if axis != Axis())
    if cut.groups > 1 or cut.start % axis.elements or (cut.stop % axis.elements and cut.stop != total):
        return None
    return part[axis.region(slice(cut.start, cut.stop))]

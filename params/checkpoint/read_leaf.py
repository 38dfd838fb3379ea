"""One leaf, or a shard of it, out of the files that hold its tensors: mapped where that suffices, else read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fnmodels.models.common import storage
from fnmodels.models.common.storage import Single, Stack, TensorSlice, disk_name
from params.io.safetensors_file import (
    Box,
    TensorEntry,
    TensorFile,
    box_shape,
    contiguous_entry,
    map_file,
    mapped_tensor,
    read_box,
    read_tensor,
    row_entries,
)
from params.quantized.keep import Target, keep
from params.quantized.kept import KeptWeight, may_stay
from params.quantized.weight import Found, QuantizedWeight, matrices, read_quantized
from params.sharding import Sharding

from .tensor_map import StoredLeaf

Located = tuple[TensorFile, TensorEntry | QuantizedWeight]


@dataclass(frozen=True)
class Source:
    """The tensors found, the files mapped so far, and how leaves are read: cast buffer, device, whether to copy."""

    found: Found
    mappings: dict[Path, memoryview]
    buffer: Tensor
    device: torch.device
    copy: bool

    def mapping(self, file: TensorFile) -> memoryview:
        if file.path not in self.mappings:
            self.mappings[file.path] = map_file(file)
        return self.mappings[file.path]


def full_box(parameter: StoredLeaf) -> Box:
    """The box of the full leaf, in its own shape."""
    return tuple(slice(0, size) for size in parameter.leaf.shape)


def read_leaf(parameter: StoredLeaf, box: Box, source: Source, dtype: torch.dtype | None) -> tuple[Tensor, bool]:
    """(the shard `box` of one parameter, whether it is mapped: no cast, device or layout change is needed)."""
    stored, shape, device = parameter.stored, box_shape(box), source.device
    singles = stored.tensors if isinstance(stored, Stack) else (stored,)
    if 0 in shape:
        on_disk = source.found[disk_name(singles[0])][1].dtype
        return torch.empty(shape, dtype=dtype or on_disk, device=device), False
    if isinstance(stored, Stack) and stored.rows:
        return _joined(stored, box, source, dtype), False
    if isinstance(stored, Stack):
        sources = [(single, source.found[disk_name(single)]) for single in stored.tensors[box[0]]]
        return _stacked(sources, box, source, dtype), False
    file, entry = source.found[disk_name(stored)]
    if isinstance(entry, TensorEntry):
        region = storage.disk_region(stored, box)
        contiguous = contiguous_entry(entry, region.box) if isinstance(region.stored, str) else None
        if dtype in (None, entry.dtype) and device.type == "cpu" and not source.copy:
            # Contiguous bytes get a storage of their own: a view into a fused tensor would keep all of it alive
            # and be copied with it.
            if contiguous is not None:
                return mapped_tensor(source.mapping(file), contiguous), True
            if box == full_box(parameter) and not _interleaved(stored):
                return storage.extract(stored, mapped_tensor(source.mapping(file), entry)), True
        # Read rather than mapped, so that mapped pages do not add to the memory of the result.
        if contiguous is not None:
            return read_tensor(file, contiguous, dtype, source.buffer).to(device), False
    elif isinstance(stored, str):
        return read_quantized(entry, dtype, source.buffer, box).to(device), False
    if isinstance(stored, TensorSlice) and stored.batched:
        one = replace(stored, batched=False)
        split = matrices(entry, box[0]) if isinstance(entry, QuantizedWeight) else row_entries(entry, box[0])
        return _stacked([(one, (file, matrix)) for matrix in split], box, source, dtype), False
    out = torch.empty(shape, dtype=dtype or entry.dtype, device=device)
    _fill(out, stored, box, (file, entry), dtype, source.buffer)
    return out, False


def keep_leaf(
    parameter: StoredLeaf, source: Source, dtype: torch.dtype | None, sharding: Sharding | None
) -> KeptWeight | None:
    """One parameter as the files have it, by a plan its shards; None where that is no form of a leaf."""
    if not may_stay(parameter.path, parameter.leaf.shape):
        return None
    target = Target(parameter.path, dtype, source.device, sharding)
    return keep(parameter.stored, parameter.leaf.shape, source.found, target, source.buffer)


def _stacked(sources: Sequence[tuple[Single, Located]], box: Box, source: Source, dtype: torch.dtype | None) -> Tensor:
    """The shard [E, ...] of a stacked parameter in one allocation, filled expert by expert."""
    out = torch.empty(box_shape(box), dtype=dtype or sources[0][1][1].dtype, device=source.device)
    for target, (single, where) in zip(out, sources, strict=True):
        _fill(target, single, box[1:], where, dtype, source.buffer)
    return out


def _joined(stored: Stack, box: Box, source: Source, dtype: torch.dtype | None) -> Tensor:
    """The shard of a parameter of which tensors hold rows, in one allocation."""
    on_disk = source.found[disk_name(stored.tensors[0])][1].dtype
    out = torch.empty(box_shape(box), dtype=dtype or on_disk, device=source.device)
    for single, rows, at in stored.places(box[0]):
        _fill(out[at], single, (rows, *box[1:]), source.found[disk_name(single)], dtype, source.buffer)
    return out


def _fill(out: Tensor, stored: Single, box: Box, where: Located, dtype: torch.dtype | None, buffer: Tensor) -> None:
    """Read the shard `box` of what is one tensor on disk (or one slice of a batched one) into `out`."""
    region, (file, entry) = storage.disk_region(stored, box), where
    if isinstance(region.stored, str) and isinstance(entry, TensorEntry) and out.device.type == "cpu":
        read_box(out, file, entry, region.box, buffer)
    else:
        storage.extract_into(out, region.stored, read_located(where, dtype, buffer, region.box), region.skip)


def read_located(where: Located, dtype: torch.dtype | None, buffer: Tensor, box: Box | None) -> Tensor:
    """A tensor or its shard `box` in the file's dtype; a quantized one dequantized to `dtype`."""
    file, entry = where
    if isinstance(entry, QuantizedWeight):
        return read_quantized(entry, dtype, buffer, box)
    return read_tensor(file, entry, None, buffer, box)


def _interleaved(stored: Single) -> bool:
    """Whether its rows are interleaved with another's, so that `extract` has to copy, and reading beats mapping."""
    return isinstance(stored, TensorSlice) and stored.groups > 1

"""From a Hugging Face checkpoint folder to (config, params).

Everything is checked before a tensor is read: the configuration gives the expected shapes, the headers what is there,
and all differences are told at once.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.disk import Part, Single, Stack, disk_name, take, take_into
from fnmodels.errors import MismatchError
from fnmodels.hf import quantization_of
from fnmodels.tree import Tree
from params.config import read_config
from params.format import Entry, TensorFile, map_file, mapped_tensor, read_into, read_tensor, scratch
from params.index import listed, open_folder
from params.init import leaf_dtype
from params.names import Piece, Slot, by_name, dtype_class, is_leftover, lacking, pieces, slots, ties, without
from params.quantized import Found, Quantized, each, pair, read_quantized

_Tensor = tuple[TensorFile, Entry | Quantized]


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    plan: None = None,
    copy: bool = False,
    check_finite: bool = False,
    drop: Collection[str] = (),
) -> tuple[Any, Tree]:
    """(config, params) of the folder `path`: config.json beside model.safetensors, or beside shards and their index.

    dtype: None keeps what each tensor has on disk, but for fp8 and mxfp4, which become bf16 (`params.quantized`);
    otherwise leaves are cast one by one, except those of a Leaf with keep_dtype. device: None is the CPU. plan: sharded
    loading, not there yet.
    copy=False maps the files: nothing is read until it is used, and writing to a leaf never reaches the file. If the
    file is truncated later, using such a leaf kills the process (SIGBUS), and if it is rewritten in place the leaf may
    change. copy=True reads everything into memory of its own, as does any cast or other device. A leaf of several
    tensors, as experts often are, is always read, into one piece. Beyond the result, at most one tensor is held. A head
    that is tied is one leaf. check_finite=True reads everything, and refuses leaves with a NaN or an infinity (which a
    cast to fp16 may bring in). drop=("mtp",) leaves out heads that predict further tokens (`fnmodels.mtp`); files that
    have none leave them out too, whatever config.json says. The config that is returned knows it.

    Raises CheckpointError by kind (see `fnmodels.errors`), and the operating system's own errors for what is missing.
    """
    if plan is not None:
        raise NotImplementedError("Loading straight into shards is not there yet: plan must be None.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype_class(dtype) == "floating"):
        raise TypeError(f"dtype must be None or a floating torch.dtype of 16 bits or more, not {dtype!r}.")
    folder = Path(path)
    with ExitStack() as stack:
        checked = check(folder, stack, drop)
        found = checked.found
        mappings: dict[Path, memoryview] = {}
        buffer = scratch()
        _check_ties(checked.tied, found, buffer)
        flat = {
            slot.path: _leaf(slot, found, mappings, _target(slot, dtype), device, copy, buffer)
            for slot in checked.parameters
        }
        if check_finite:
            _check_finite(folder, checked.parameters, flat, found)
    return checked.config, tree.unflatten(flat)


@dataclass(frozen=True)
class Checked:
    """A folder of which everything but the tensors' values is known to be good.

    found: {name on disk: (its file, where it lies)}, of which leftovers are no parameter's. tied: {name that a tied
    head may have: name of the tensor it must equal}. prefix: what the names on disk lack.
    """

    config: Any
    parameters: tuple[Slot, ...]
    found: Found
    leftovers: tuple[str, ...]
    tied: dict[str, str]
    prefix: str


def check(folder: Path, stack: ExitStack, drop: Collection[str] = ()) -> Checked:
    """What `load_pretrained` does before it reads a tensor; `stack` closes the files. Errors as there."""
    config, values = read_config(folder)
    found = pair(folder, open_folder(folder, stack), quantization_of(values))
    parameters = slots(config)
    prefix = lacking(parameters, found)
    smaller, dropped = without(config, drop, found, prefix)
    if prefix or smaller != config:
        config, parameters = smaller, slots(smaller, prefix)
    found = {name: value for name, value in found.items() if name not in dropped}
    tied = ties(config, prefix)
    leftovers = tuple(name for name in found if is_leftover(config, prefix + name))
    known = {name: value for name, value in found.items() if name not in leftovers}
    _compare(folder, by_name(parameters), tied, known)
    return Checked(config, parameters, found, leftovers, tied, prefix)


def _compare(folder: Path, expected: dict[str, list[Piece]], tied: dict[str, str], found: Found) -> None:
    """MismatchError with every difference between the tensors called for and those that the headers announce."""
    faults, strangers = [], []
    dtypes: dict[str, tuple[str, torch.dtype]] = {}  # of leaves that are several tensors
    for name, (piece, *_) in expected.items():
        if name not in found:
            faults.append(f"{name}: missing; expected {list(piece.disk_shape)}")
            continue
        file, entry = found[name]
        faults += _faults(name, piece, file, entry)
        if piece.index is not None:
            other, dtype = dtypes.setdefault(piece.path, (name, entry.dtype))
            if entry.dtype != dtype:
                faults.append(f"{name}: {_name(entry.dtype)}, but {other}, which it is stacked with, is {_name(dtype)}")
    for name, (file, entry) in found.items():
        if name in tied:
            faults += _faults(name, expected[tied[name]][0], file, entry)
        elif name not in expected:
            strangers.append(f"{name!r} in {file.path.name}: unexpected, {list(entry.shape)} of {_name(entry.dtype)}")
    if faults or strangers:
        raise MismatchError(
            f"{folder}: the tensors are not those that config.json calls for "
            f"({len(faults) + len(strangers)} differences):{listed(faults)}{listed(strangers)}"
        )


def _faults(name: str, piece: Piece, file: TensorFile, entry: Entry | Quantized) -> list[str]:
    faults = []
    if entry.shape != piece.disk_shape:
        faults.append(f"{name} in {file.path.name}: expected {list(piece.disk_shape)}, found {list(entry.shape)}")
    wanted = dtype_class(piece.leaf.dtype)
    if dtype_class(entry.dtype) != wanted:
        faults.append(f"{name} in {file.path.name}: expected a {wanted} dtype, found {_name(entry.dtype)}")
    return faults


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_ties(tied: dict[str, str], found: Found, buffer: Tensor) -> None:
    """A tied head, or another copy, may be on disk if it is the same, bit for bit; else file or config is wrong."""
    for name, twin in tied.items():
        if name in found and not _same(found[name], found[twin], buffer):
            raise MismatchError(
                f"{found[name][0].path}: {name} differs from {twin}, but by config.json (tie_word_embeddings, or "
                "num_nextn_predict_layers) they are one tensor."
            )


def _same(one: _Tensor, two: _Tensor, buffer: Tensor) -> bool:
    """Whether two tensors of one shape have the same bits: NaN equals itself here, and -0 is not 0.

    Read rather than mapped, and piece by piece, so that nothing is held and no file that shrinks kills the process.
    """
    (file, entry), (other, twin) = one, two
    if entry.dtype != twin.dtype:
        return False
    if isinstance(entry, Quantized) or isinstance(twin, Quantized):
        whole = [_read(*where, None, buffer).contiguous().view(torch.uint8) for where in (one, two)]
        return torch.equal(*whole)
    halves, size = buffer.chunk(2), entry.stop - entry.start
    for begin in range(0, size, len(halves[0])):
        count = min(len(halves[0]), size - begin)
        parts = [part[:count] for part in halves]
        for part, source, tensor in ((parts[0], file, entry), (parts[1], other, twin)):
            start = tensor.start + begin
            read_into(part, source, Entry(torch.uint8, (count,), start, start + count), buffer)
        if not torch.equal(*parts):
            return False
    return True


def _check_finite(folder: Path, parameters: tuple[Slot, ...], flat: dict[str, Tensor], found: Found) -> None:
    """MismatchError with every leaf that has a value which no training gives a good model."""
    faults = []
    for piece in itertools.chain.from_iterable(pieces(slot) for slot in parameters):
        value, name = piece.value(flat), disk_name(piece.stored)
        # in one pass and without a mask as large as the leaf: NaN spreads to both ends
        if value.is_floating_point() and value.numel() and not all(end.isfinite() for end in torch.aminmax(value)):
            count = value.numel() - int(value.isfinite().sum())
            faults.append(f"{name} in {found[name][0].path.name}: {count:,} of {value.numel():,} values are not finite")
    if faults:
        raise MismatchError(f"{folder}: check_finite found NaN or infinities ({len(faults)} tensors):{listed(faults)}")


def _target(slot: Slot, dtype: torch.dtype | None) -> torch.dtype | None:
    return None if dtype is None else leaf_dtype(slot.leaf, dtype)


def _leaf(
    slot: Slot,
    found: Found,
    mappings: dict[Path, memoryview],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    copy: bool,
    buffer: Tensor,
) -> Tensor:
    """One parameter, mapped where it can stay as and where it is on disk."""
    stored = slot.stored
    if isinstance(stored, Stack):
        several = [(single, *found[disk_name(single)]) for single in stored.parts]
        return _stacked(slot, several, dtype, device, buffer)
    file, entry = found[disk_name(stored)]
    if isinstance(entry, Entry):
        piece = _piece(stored, slot.leaf.shape, entry)
        stays = dtype in (None, entry.dtype) and torch.device(device or "cpu").type == "cpu"
        if stays and not copy and not _takes_turns(stored):
            mapping = _mapping(mappings, file)
            return take(stored, mapped_tensor(mapping, entry)) if piece is None else mapped_tensor(mapping, piece)
        # Read rather than mapped, so that the pages of a file which is left behind do not count beside the result.
        if piece is not None:
            return read_tensor(file, piece, dtype, buffer).to(device or "cpu")
    elif isinstance(stored, str):
        return read_quantized(file, entry, dtype, buffer).to(device or "cpu")
    if isinstance(stored, Part) and stored.batched:
        one = replace(stored, batched=False)
        return _stacked(slot, [(one, file, part) for part in each(entry)], dtype, device, buffer)
    out = torch.empty(slot.leaf.shape, dtype=dtype or entry.dtype, device=device or "cpu")
    take_into(out, stored, _read(file, entry, dtype, buffer))
    return out


def _stacked(
    slot: Slot,
    several: Sequence[tuple[Single, TensorFile, Entry | Quantized]],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    buffer: Tensor,
) -> Tensor:
    """A parameter [E, ...] in one allocation, filled entry by entry."""
    out = torch.empty(slot.leaf.shape, dtype=dtype or several[0][2].dtype, device=device or "cpu")
    for target, (single, file, entry) in zip(out, several, strict=True):
        piece = _piece(single, tuple(target.shape), entry) if isinstance(entry, Entry) else None
        if piece is not None and target.device.type == "cpu":
            read_into(target, file, piece, buffer)
        else:
            take_into(target, single, _read(file, entry, dtype, buffer))
    return out


def _read(file: TensorFile, entry: Entry | Quantized, dtype: torch.dtype | None, buffer: Tensor) -> Tensor:
    """A tensor as it is in the file; where its numbers have few bits, as they were meant, in `dtype`."""
    if isinstance(entry, Quantized):
        return read_quantized(file, entry, dtype, buffer)
    return read_tensor(file, entry, None, buffer)


def _takes_turns(stored: Single) -> bool:
    """Whether its rows alternate with another's, so that `take` copies: then better from what was read."""
    return isinstance(stored, Part) and stored.groups > 1


def _piece(stored: Single, shape: tuple[int, ...], entry: Entry) -> Entry | None:
    """The bytes of a parameter which is all of a tensor on disk, or rows of it one after the other; else None.

    So each such leaf has a storage of its own: a slice of a fused tensor would keep all of it, and be copied with it.
    """
    if isinstance(stored, str):
        return entry
    if stored.batched or stored.groups > 1 or (stored.transposed and len(entry.shape) > 1):
        return None
    row = (entry.stop - entry.start) // stored.rows
    return Entry(entry.dtype, shape, entry.start + stored.start * row, entry.start + stored.stop * row)


def _mapping(mappings: dict[Path, memoryview], file: TensorFile) -> memoryview:
    if file.path not in mappings:
        mappings[file.path] = map_file(file)
    return mappings[file.path]

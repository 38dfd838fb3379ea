"""From a Hugging Face checkpoint folder to (config, params).

Everything is checked before a tensor is read: the configuration gives the expected shapes, the headers what is there,
and all differences are told at once.
"""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.disk import disk_name, take
from fnmodels.errors import MismatchError
from fnmodels.tree import Tree
from params.config import load_config
from params.format import Entry, TensorFile, map_file, mapped_tensor, read_tensor, scratch
from params.index import listed, open_folder
from params.init import leaf_dtype
from params.names import Slot, by_name, dtype_class, is_leftover, lacking, slots, ties

Found = dict[str, tuple[TensorFile, Entry]]


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    plan: None = None,
    copy: bool = False,
    check_finite: bool = False,
) -> tuple[Any, Tree]:
    """(config, params) of the folder `path`: config.json beside model.safetensors, or beside shards and their index.

    dtype: None keeps what each tensor has on disk; otherwise leaves are cast one by one, except those of a Leaf with
    keep_dtype. device: None is the CPU. plan: sharded loading, not there yet.
    copy=False maps the files: nothing is read until it is used, and writing to a leaf never reaches the file. If the
    file is truncated later, using such a leaf kills the process (SIGBUS), and if it is rewritten in place the leaf may
    change. copy=True reads everything into memory of its own, as does any cast or other device. Beyond the result, at
    most one tensor is held. A head that is tied is one leaf. check_finite=True reads everything, and refuses leaves
    with a NaN or an infinity (which a cast to fp16 may bring in).

    Raises CheckpointError by kind (see `fnmodels.errors`), and the operating system's own errors for what is missing.
    """
    if plan is not None:
        raise NotImplementedError("Loading straight into shards is not there yet: plan must be None.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype_class(dtype) == "floating"):
        raise TypeError(f"dtype must be None or a floating torch.dtype of 16 bits or more, not {dtype!r}.")
    folder = Path(path)
    config = load_config(folder)
    with ExitStack() as stack:
        found = open_folder(folder, stack)
        prefix = lacking(config, found)
        parameters, tied = slots(config, prefix), ties(config, prefix)
        known = {name: value for name, value in found.items() if not is_leftover(config, prefix + name)}
        _compare(folder, by_name(parameters), tied, known)
        mappings: dict[Path, mmap.mmap] = {}
        buffer = scratch()
        _check_ties(tied, found, mappings)
        flat = {
            slot.path: _leaf(slot, *found[disk_name(slot.stored)], mappings, _target(slot, dtype), device, copy, buffer)
            for slot in parameters
        }
        if check_finite:
            _check_finite(folder, parameters, flat, found)
    return config, tree.unflatten(flat)


def _compare(folder: Path, expected: dict[str, list[Slot]], tied: dict[str, str], found: Found) -> None:
    """MismatchError with every difference between the tensors called for and those that the headers announce."""
    faults = []
    for name, (slot, *_) in expected.items():
        if name in found:
            faults += _faults(name, slot, *found[name])
        else:
            faults.append(f"{name}: missing; expected {list(slot.disk_shape)}")
    for name, (file, entry) in found.items():
        if name in tied:
            faults += _faults(name, expected[tied[name]][0], file, entry)
        elif name not in expected:
            faults.append(f"{name!r} in {file.path.name}: unexpected, {list(entry.shape)} of {_name(entry.dtype)}")
    if faults:
        raise MismatchError(
            f"{folder}: the tensors are not those that config.json calls for "
            f"({len(faults)} differences):{listed(faults)}"
        )


def _faults(name: str, slot: Slot, file: TensorFile, entry: Entry) -> list[str]:
    faults = []
    if entry.shape != slot.disk_shape:
        faults.append(f"{name} in {file.path.name}: expected {list(slot.disk_shape)}, found {list(entry.shape)}")
    wanted = dtype_class(slot.leaf.dtype)
    if dtype_class(entry.dtype) != wanted:
        faults.append(f"{name} in {file.path.name}: expected a {wanted} dtype, found {_name(entry.dtype)}")
    return faults


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_ties(tied: dict[str, str], found: Found, mappings: dict[Path, mmap.mmap]) -> None:
    """A tied head may be on disk too if it is the same, bit for bit; else the file or the configuration is wrong."""
    for name, twin in tied.items():
        if name in found:
            one, two = (mapped_tensor(_mapping(mappings, file), entry) for file, entry in (found[name], found[twin]))
            # compared as bytes: NaN equals itself here, and -0 is not 0
            if one.dtype != two.dtype or not torch.equal(one.view(torch.uint8), two.view(torch.uint8)):
                raise MismatchError(
                    f"{found[name][0].path}: {name} differs from {twin}, but config.json says tie_word_embeddings, "
                    "which makes them one tensor."
                )


def _check_finite(folder: Path, parameters: tuple[Slot, ...], flat: dict[str, Tensor], found: Found) -> None:
    """MismatchError with every leaf that has a value which no training gives a good model."""
    faults = []
    for slot in parameters:
        leaf, name = flat[slot.path], disk_name(slot.stored)
        # in one pass and without a mask as large as the leaf: NaN spreads to both ends
        if leaf.is_floating_point() and leaf.numel() and not all(end.isfinite() for end in torch.aminmax(leaf)):
            count = leaf.numel() - int(leaf.isfinite().sum())
            faults.append(f"{name} in {found[name][0].path.name}: {count:,} of {leaf.numel():,} values are not finite")
    if faults:
        raise MismatchError(f"{folder}: check_finite found NaN or infinities ({len(faults)} tensors):{listed(faults)}")


def _target(slot: Slot, dtype: torch.dtype | None) -> torch.dtype | None:
    return None if dtype is None else leaf_dtype(slot.leaf, dtype)


def _leaf(
    slot: Slot,
    file: TensorFile,
    entry: Entry,
    mappings: dict[Path, mmap.mmap],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    copy: bool,
    buffer: Tensor,
) -> Tensor:
    """One parameter, mapped where it can stay as and where it is on disk."""
    piece = _piece(slot, entry)
    stays = dtype in (None, entry.dtype) and torch.device(device or "cpu").type == "cpu"
    if stays and not copy:
        mapping = _mapping(mappings, file)
        return take(slot.stored, mapped_tensor(mapping, entry)) if piece is None else mapped_tensor(mapping, piece)
    # Read rather than mapped, so that the pages of a file which is left behind do not count beside the result.
    if piece is not None:
        return read_tensor(file, piece, dtype, buffer).to(device or "cpu")
    part = take(slot.stored, read_tensor(file, entry, None, buffer))
    return torch.empty(part.shape, dtype=dtype or part.dtype, device=device or "cpu").copy_(part)


def _piece(slot: Slot, entry: Entry) -> Entry | None:
    """The bytes of a parameter which is all of a tensor on disk, or rows of it one after the other; else None.

    So each such leaf has a storage of its own: a slice of a fused tensor would keep all of it, and be copied with it.
    """
    stored = slot.stored
    if isinstance(stored, str):
        return entry
    if stored.groups > 1 or (stored.transposed and len(entry.shape) > 1):
        return None
    row = (entry.stop - entry.start) // stored.rows
    return Entry(entry.dtype, slot.leaf.shape, entry.start + stored.start * row, entry.start + stored.stop * row)


def _mapping(mappings: dict[Path, mmap.mmap], file: TensorFile) -> mmap.mmap:
    if file.path not in mappings:
        mappings[file.path] = map_file(file)
    return mappings[file.path]

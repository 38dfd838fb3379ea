"""From a Hugging Face checkpoint folder to (config, params).

Everything is checked before a tensor is read: the configuration gives the expected shapes, the headers what is there,
and all differences are told at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import MismatchError
from fnmodels.models.common.config_json import quantization_of
from fnmodels.models.common.registry import family_of
from fnmodels.models.common.storage import (
    Single,
    Stack,
    TensorSlice,
    disk_name,
    disk_names,
    disk_region,
    extract,
    extract_into,
)
from fnmodels.tree import Tree
from params.initialize import leaf_dtype
from params.io.safetensors_file import (
    Box,
    Entry,
    TensorFile,
    box_shape,
    cast_buffer,
    contiguous_entry,
    map_file,
    mapped_tensor,
    read_box,
    read_into,
    read_tensor,
)
from params.sharding import Sharding, plan_by_path

from .config import read_config
from .dequantize import Found, Quantized, pair_scales, read_quantized, split_rows
from .shard_index import as_lines, open_folder
from .tensor_map import (
    Piece,
    StoredLeaf,
    by_name,
    drop_optional,
    dtype_class,
    is_leftover,
    missing_prefix,
    stored_leaves,
    tied_names,
)

_Tensor = tuple[TensorFile, Entry | Quantized]


@dataclass(frozen=True)
class LoadReport:
    """What a call of `load_pretrained` takes of the files, in bytes.

    read: headers and what was compared among it. mapped: of leaves that lie in the files and are read when they are
    used. files: how large all of them are.
    """

    read: int
    mapped: int
    files: int


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    plan: Tree | None = None,
    copy: bool = False,
    check_finite: bool = False,
    drop: Collection[str] = (),
    report: Callable[[LoadReport], object] | None = None,
) -> tuple[Any, Tree]:
    """(config, params) of the folder `path`: config.json beside model.safetensors, or beside shards and their index.

    dtype: None keeps what each tensor has on disk, but for fp8 and mxfp4, which become bf16
    (`params.checkpoint.dequantize`);
    otherwise leaves are cast one by one. Those of a Leaf with keep_dtype come in its dtype, with None in no narrower
    one. device: None is the CPU.
    plan: `params.plan`'s, made with a DeviceMesh: leaves become DTensors on it, of which each process takes its own
    part from the files, where rows are read alone, and columns with what lies closely between them. A plan of some
    stages (`train.parallel.pipeline.tree_split.share`) loads what it names. Nothing is sent: what the headers tell,
    all processes
    raise alike; what only values tell (a tied head that differs), the one that reads these.
    copy=False maps the files: nothing is read until it is used, and writing to a leaf never reaches the file. If the
    file is truncated later, using such a leaf kills the process (SIGBUS), and if it is rewritten in place the leaf may
    change. copy=True reads everything into memory of its own, as does any cast or other device. A leaf of several
    tensors, as experts often are, is always read, into one piece. Beyond the result, at most one tensor is held. A head
    that is tied is one leaf. check_finite=True reads everything, and refuses leaves with a NaN or an infinity (which a
    cast to fp16 may bring in). drop=("mtp",) leaves out heads that predict further tokens (`fnmodels.mtp`); files that
    have none leave them out too, whatever config.json says. The config that is returned knows it.
    report: is called with what was read (`report=print`).

    Raises CheckpointError by kind (see `fnmodels.errors`), and the operating system's own errors for what is missing.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype_class(dtype) == "floating"):
        raise TypeError(f"dtype must be None or a floating torch.dtype of 16 bits or more, not {dtype!r}.")
    folder = Path(path)
    with ExitStack() as stack:
        checked = check_folder(folder, stack, drop)
        plan, placements = _placed(plan, checked)
        chosen = [parameter for parameter in checked.parameters if placements is None or parameter.path in placements]
        parts = {
            parameter.path: placements[parameter.path].local_box() if placements else _all(parameter)
            for parameter in chosen
        }
        share = next(iter(placements.values())).rank_and_count() if placements else (0, 1)
        source = _Source(checked.found, {}, cast_buffer(), torch.device(device or _device(placements)), copy)
        _check_ties(checked.tied, checked.found, source.buffer, share)
        made = {
            parameter.path: _leaf(parameter, parts[parameter.path], source, _target(parameter, dtype, checked.found))
            for parameter in chosen
        }
        flat = {path: leaf for path, (leaf, _) in made.items()}
        if check_finite:
            _check_finite(folder, chosen, parts, flat, checked.found)
        if report is not None:
            mapped = sum(leaf.nbytes for leaf, is_mapped in made.values() if is_mapped)
            sizes = (max((e.stop for e in file.entries.values()), default=0) for file in checked.files)
            report(LoadReport(checked.files[0].handles.read, mapped, sum(sizes)))
    if placements is None:
        return checked.config, tree.unflatten(flat)
    paths = iter(tree.flatten(plan))
    return checked.config, tree.map(lambda how: how.distribute(flat[next(paths)]), plan)


def _placed(plan: Tree | None, checked: CheckedFolder) -> tuple[Tree, dict[str, Sharding] | None]:
    """(the plan of what is loaded, the same by path). ValueError where it is of another model."""
    if plan is None:
        return None, None
    leaves = {parameter.path: parameter.leaf for parameter in checked.parameters}
    tops = {path.partition(".")[0] for path in leaves}
    left_out = getattr(family_of(checked.config), "OPTIONAL", {}).keys() - tops
    plan = {name: how for name, how in plan.items() if name not in left_out}
    if isinstance(plan.get("layers"), Mapping):  # of stages
        named = tree.flatten(plan).keys()
        leaves = {path: leaf for path, leaf in leaves.items() if path in named}
    return plan, plan_by_path(plan, leaves)


def _device(placements: dict[str, Sharding] | None) -> str:
    mesh = next(iter(placements.values())).mesh if placements else None
    return "cpu" if mesh is None else mesh.device_type


def _all(parameter: StoredLeaf) -> Box:
    return tuple(slice(0, size) for size in parameter.leaf.shape)


@dataclass(frozen=True)
class CheckedFolder:
    """A folder of which everything but the tensors' values is known to be good.

    found: {name on disk: (its file, where it lies)}, of which leftovers are no parameter's. tied: {name that a tied
    head may have: name of the tensor it must equal}. prefix: what the names on disk lack.
    """

    config: Any
    files: tuple[TensorFile, ...]
    parameters: tuple[StoredLeaf, ...]
    found: Found
    leftovers: tuple[str, ...]
    tied: dict[str, str]
    prefix: str


def check_folder(folder: Path, stack: ExitStack, drop: Collection[str] = ()) -> CheckedFolder:
    """What `load_pretrained` does before it reads a tensor; `stack` closes the files. Errors as there."""
    config, values = read_config(folder)
    opened = open_folder(folder, stack)
    files = tuple({file.path: file for file, _ in opened.values()}.values())
    found = pair_scales(folder, opened, quantization_of(values))
    parameters = stored_leaves(config)
    prefix = missing_prefix(parameters, found)
    smaller, dropped = drop_optional(config, drop, found, prefix)
    if prefix or smaller != config:
        config, parameters = smaller, stored_leaves(smaller, prefix)
    found = {name: value for name, value in found.items() if name not in dropped}
    tied = tied_names(config, prefix)
    expected = by_name(parameters)
    leftovers = tuple(name for name in found if name not in expected and is_leftover(config, prefix + name))
    known = {name: value for name, value in found.items() if name not in leftovers}
    _compare(folder, expected, tied, known)
    return CheckedFolder(config, files, parameters, found, leftovers, tied, prefix)


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
            f"({len(faults) + len(strangers)} differences):{as_lines(faults)}{as_lines(strangers)}"
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


def _check_ties(tied: dict[str, str], found: Found, buffer: Tensor, share: tuple[int, int]) -> None:
    """A tied head, or another copy, may be on disk if it is the same, bit for bit; else file or config is wrong.

    share: (i, n) of n processes the i-th, which compares an n-th of the bytes.
    """
    for name, twin in tied.items():
        if name in found and not _same(found[name], found[twin], buffer, share):
            raise MismatchError(
                f"{found[name][0].path}: {name} differs from {twin}, but by config.json (tie_word_embeddings, or "
                "num_nextn_predict_layers) they are one tensor."
            )


def _same(one: _Tensor, two: _Tensor, buffer: Tensor, share: tuple[int, int]) -> bool:
    """Whether two tensors of one shape have the same bits in a share: NaN equals itself here, and -0 is not 0.

    Read rather than mapped, and piece by piece, so that nothing is held and no file that shrinks kills the process.
    """
    (file, entry), (other, twin) = one, two
    if entry.dtype != twin.dtype:
        return False
    if isinstance(entry, Quantized) or isinstance(twin, Quantized):
        whole = [_read(*where, None, buffer, None).contiguous().view(torch.uint8) for where in (one, two)]
        return torch.equal(*whole)
    halves, size = buffer.chunk(2), entry.stop - entry.start
    first, last = (size * index // share[1] for index in (share[0], share[0] + 1))
    for begin in range(first, last, len(halves[0])):
        count = min(len(halves[0]), last - begin)
        parts = [part[:count] for part in halves]
        for part, source, tensor in ((parts[0], file, entry), (parts[1], other, twin)):
            start = tensor.start + begin
            read_into(part, source, Entry(torch.uint8, (count,), start, start + count), buffer)
        if not torch.equal(*parts):
            return False
    return True


def _check_finite(
    folder: Path, chosen: Sequence[StoredLeaf], parts: dict[str, Box], flat: dict[str, Tensor], found: Found
) -> None:
    """MismatchError with every leaf that has a value which no training gives a good model."""
    faults = []
    for parameter in chosen:
        for name, value in _by_name(parameter, parts[parameter.path], flat[parameter.path]):
            # in one pass and without a mask as large as the leaf: NaN spreads to both ends
            if value.is_floating_point() and value.numel() and not all(e.isfinite() for e in torch.aminmax(value)):
                count, where = value.numel() - int(value.isfinite().sum()), found[name][0].path.name
                faults.append(f"{name} in {where}: {count:,} of {value.numel():,} values are not finite")
    if faults:
        raise MismatchError(
            f"{folder}: check_finite found NaN or infinities ({len(faults)} tensors):{as_lines(faults)}"
        )


def _by_name(parameter: StoredLeaf, part: Box, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The names on disk of what the part of a parameter is made of, with their values."""
    if isinstance(parameter.stored, Stack):
        yield from zip(map(disk_name, parameter.stored.tensors[part[0]]), value, strict=True)
    else:
        yield disk_name(parameter.stored), value


def _target(parameter: StoredLeaf, dtype: torch.dtype | None, found: Found) -> torch.dtype | None:
    if dtype is None and parameter.leaf.keep_dtype:  # some files have all in bf16, where a small step is rounded away
        return torch.promote_types(found[disk_names(parameter.stored)[0]][1].dtype, parameter.leaf.dtype)
    return None if dtype is None else leaf_dtype(parameter.leaf, dtype)


@dataclass(frozen=True)
class _Source:
    """Where leaves come from, and how: files that are mapped, memory to cast through."""

    found: Found
    mappings: dict[Path, memoryview]
    buffer: Tensor
    device: torch.device
    copy: bool

    def mapping(self, file: TensorFile) -> memoryview:
        if file.path not in self.mappings:
            self.mappings[file.path] = map_file(file)
        return self.mappings[file.path]


def _leaf(parameter: StoredLeaf, part: Box, source: _Source, dtype: torch.dtype | None) -> tuple[Tensor, bool]:
    """(a part of one parameter, whether it is mapped, which it is where it can stay as and where it is on disk)."""
    stored, shape, device = parameter.stored, box_shape(part), source.device
    singles = stored.tensors if isinstance(stored, Stack) else (stored,)
    if 0 in shape:
        kept = source.found[disk_name(singles[0])][1].dtype
        return torch.empty(shape, dtype=dtype or kept, device=device), False
    if isinstance(stored, Stack):
        several = [(single, *source.found[disk_name(single)]) for single in stored.tensors[part[0]]]
        return _stacked(several, part, source, dtype), False
    file, entry = source.found[disk_name(stored)]
    if isinstance(entry, Entry):
        place = disk_region(stored, part)
        piece = contiguous_entry(entry, place.box) if isinstance(place.stored, str) else None
        if dtype in (None, entry.dtype) and device.type == "cpu" and not source.copy:
            # Each leaf of its own bytes has a storage of its own: a slice of a fused tensor would keep all of it, and
            # be copied with it.
            if piece is not None:
                return mapped_tensor(source.mapping(file), piece), True
            if part == _all(parameter) and not _takes_turns(stored):
                return extract(stored, mapped_tensor(source.mapping(file), entry)), True
        # Read rather than mapped, so that the pages of a file which is left behind do not count beside the result.
        if piece is not None:
            return read_tensor(file, piece, dtype, source.buffer).to(device), False
    elif isinstance(stored, str):
        return read_quantized(file, entry, dtype, source.buffer, part).to(device), False
    if isinstance(stored, TensorSlice) and stored.batched:
        one = replace(stored, batched=False)
        return _stacked([(one, file, each_one) for each_one in split_rows(entry, part[0])], part, source, dtype), False
    out = torch.empty(shape, dtype=dtype or entry.dtype, device=device)
    _fill(out, stored, part, file, entry, dtype, source.buffer)
    return out, False


def _stacked(
    several: Sequence[tuple[Single, TensorFile, Entry | Quantized]],
    part: Box,
    source: _Source,
    dtype: torch.dtype | None,
) -> Tensor:
    """A part [E, ...] of a parameter in one allocation, filled entry by entry."""
    out = torch.empty(box_shape(part), dtype=dtype or several[0][2].dtype, device=source.device)
    for target, (single, file, entry) in zip(out, several, strict=True):
        _fill(target, single, part[1:], file, entry, dtype, source.buffer)
    return out


def _fill(
    out: Tensor,
    stored: Single,
    part: Box,
    file: TensorFile,
    entry: Entry | Quantized,
    dtype: torch.dtype | None,
    buffer: Tensor,
) -> None:
    """Read a part of what is one tensor on disk, or rows of it, into memory that is there."""
    place = disk_region(stored, part)
    if isinstance(place.stored, str) and isinstance(entry, Entry) and out.device.type == "cpu":
        read_box(out, file, entry, place.box, buffer)
    else:
        extract_into(out, place.stored, _read(file, entry, dtype, buffer, place.box), place.skip)


def _read(
    file: TensorFile, entry: Entry | Quantized, dtype: torch.dtype | None, buffer: Tensor, box: Box | None
) -> Tensor:
    """A tensor, or a box of it, as it is in the file; where numbers have few bits, as they were meant, in `dtype`."""
    if isinstance(entry, Quantized):
        return read_quantized(file, entry, dtype, buffer, box)
    return read_tensor(file, entry, None, buffer, box)


def _takes_turns(stored: Single) -> bool:
    """Whether its rows alternate with another's, so that `extract` copies: then better from what was read."""
    return isinstance(stored, TensorSlice) and stored.groups > 1

"""Loading a Hugging Face checkpoint folder as (config, params).

Everything is checked before a tensor is read: the shapes that the config expects are compared with the headers, and one
error lists all differences.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.errors import MismatchError
from fnmodels.models.common import storage
from fnmodels.models.common.quantization import quantization_of
from fnmodels.models.common.registry import DecoderConfig, family_of, may_have
from fnmodels.models.common.storage import Single, Stack, TensorSlice, disk_name
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

from . import tensor_map
from .config import part_of, read_config
from .dequantize import Found, Quantized, pair_scales, read_quantized, split_rows
from .integer_weights import is_zero_bias
from .shard_index import as_lines, open_folder
from .tensor_map import Piece, StoredLeaf, dtype_class

_Located = tuple[TensorFile, Entry | Quantized]


@dataclass(frozen=True)
class LoadReport:
    """Bytes that one call of `load_pretrained` reads and maps.

    read: including headers and compared copies. mapped: leaves that are read only when they are used. files: size of
    all files.
    """

    read: int
    mapped: int
    files: int


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    family: Any = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    plan: Tree | None = None,
    copy: bool = False,
    check_finite: bool = False,
    drop: Collection[str] = (),
    head: Literal["none"] | None = None,
    part: str | None = None,
    report: Callable[[LoadReport], object] | None = None,
) -> tuple[Any, Tree]:
    """(config, params) of the folder `path`: config.json beside model.safetensors, or beside shards and their index.
    The files of diffusers are diffusion_pytorch_model.safetensors and its shards.

    family: the module that reads this checkpoint, in or outside of fnmodels; None finds that of its model_type.
    dtype: None keeps the dtype on disk, except that fp8 and mxfp4 become bf16 (`params.checkpoint.dequantize`), and
    integers with scales (AWQ, GPTQ, compressed-tensors: `params.checkpoint.integer_weights`) the dtype of their scales;
    otherwise leaves are cast one by one. A Leaf with keep_dtype is loaded in its own dtype, or with None in no narrower
    one. device: None is the CPU.
    plan: from `params.plan` with a DeviceMesh; leaves become DTensors, and each process reads only its shards: rows
    exactly, columns with small gaps between them. A plan for some pipeline stages loads the leaves that it names.
    Nothing is communicated: errors found in the headers are raised by all processes, errors found in values (a tied
    head that differs) only by the process that reads them.
    copy=False maps the files: nothing is read until it is used, and writing to a leaf never reaches the file. If the
    file is truncated later, using such a leaf kills the process (SIGBUS), and if it is rewritten in place the leaf may
    change. copy=True reads everything into new memory, as does any cast or other device. A leaf of several tensors,
    such as stacked experts, is always read. At most one tensor is held in addition to the result. A tied head is one
    leaf. check_finite=True reads everything and refuses leaves with NaN or infinities (also from a cast to fp16).
    drop=("mtp",) leaves out the MTP heads (`fnmodels.mtp`); they are also left out if the files have none, whatever
    config.json says. The returned config reflects that. drop=("audio",) of a Gemma 4 with an audio tower, which is not
    read, loads the rest; without it such a model is refused. head="none" reads the model without its head, which the
    files may have or not, so that `forward` returns hidden states after the final norm. A vision-language model is read
    with its tower. part="text" or "vision": of a model of several parts, such as CLIP or LLaVA, that one alone: (its
    Config, its params); all headers are checked, and only its tensors are read. A text model is its own part "text".
    report: is called with a LoadReport (`report=print`).

    Raises the subclasses of CheckpointError (see `fnmodels.errors`), and OSErrors for missing files.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype_class(dtype) == "floating"):
        raise TypeError(f"dtype must be None or a floating torch.dtype of 16 bits or more, not {dtype!r}.")
    folder = Path(path)
    with ExitStack() as stack:
        checked = check_folder(folder, stack, drop, family, head, part)
        if part is None:
            tensor_map.refuse_unread(checked.config, checked.leftovers, drop, folder)
        plan, placements = _placed(plan, checked)
        chosen = [parameter for parameter in checked.parameters if placements is None or parameter.path in placements]
        boxes = {
            parameter.path: placements[parameter.path].local_box() if placements else _full_box(parameter)
            for parameter in chosen
        }
        share = next(iter(placements.values())).rank_and_count() if placements else (0, 1)
        source = _Source(checked.found, {}, cast_buffer(), torch.device(device or _device(placements)), copy)
        _check_ties(checked.tied, checked.found, source.buffer, share)
        made = {
            parameter.path: _leaf(parameter, boxes[parameter.path], source, _target(parameter, dtype, checked.found))
            for parameter in chosen
        }
        flat = {path: leaf for path, (leaf, _) in made.items()}
        if check_finite:
            _check_finite(folder, chosen, boxes, flat, checked.found)
        if report is not None:
            mapped = sum(leaf.nbytes for leaf, is_mapped in made.values() if is_mapped)
            sizes = (max((e.stop for e in file.entries.values()), default=0) for file in checked.files)
            report(LoadReport(checked.files[0].handles.read, mapped, sum(sizes)))
    if placements is None:
        return checked.config, tree.unflatten(flat)
    paths = iter(tree.flatten(plan))
    return checked.config, tree.map(lambda how: how.distribute(flat[next(paths)]), plan)


def _placed(plan: Tree | None, checked: CheckedFolder) -> tuple[Tree, dict[str, Sharding] | None]:
    """(the plan restricted to what is loaded, {path: Sharding} of it). ValueError where it is for another model."""
    if plan is None:
        return None, None
    leaves = {parameter.path: parameter.leaf for parameter in checked.parameters}
    tops = {path.partition(".")[0] for path in leaves}
    left_out = may_have(family_of(checked.config), "OPTIONAL").keys() - tops
    plan = {name: how for name, how in plan.items() if name not in left_out}
    if isinstance(plan.get("layers"), Mapping):  # a plan of pipeline stages
        named = tree.flatten(plan).keys()
        leaves = {path: leaf for path, leaf in leaves.items() if path in named}
    return plan, plan_by_path(plan, leaves)


def _device(placements: dict[str, Sharding] | None) -> str:
    mesh = next(iter(placements.values())).mesh if placements else None
    return "cpu" if mesh is None else mesh.device_type


def _full_box(parameter: StoredLeaf) -> Box:
    return tuple(slice(0, size) for size in parameter.leaf.shape)


@dataclass(frozen=True)
class CheckedFolder:
    """A checkpoint folder that has passed all checks except those of the tensors' values.

    found: {name on disk: (its file, its entry)}. leftovers: names in it that are no parameter. tied: {name of a
    redundant tensor: name of the tensor it must equal}. prefix: the first component that the names on disk omit.
    """

    config: DecoderConfig
    files: tuple[TensorFile, ...]
    parameters: tuple[StoredLeaf, ...]
    found: Found
    leftovers: tuple[str, ...]
    tied: dict[str, str]
    prefix: str


def check_folder(
    folder: Path,
    stack: ExitStack,
    drop: Collection[str] = (),
    family: Any = None,
    head: str | None = None,
    part: str | None = None,
) -> CheckedFolder:
    """The checks of `load_pretrained`, without reading a tensor; `stack` closes the files. Errors as there."""
    declared, values = read_config(folder, family, part)
    config = declared if head is None else replace(declared, head=head, num_labels=0)
    opened = open_folder(folder, stack, may_have(family_of(config), "WEIGHTS"))
    files = tuple({file.path: file for file, _ in opened.values()}.values())
    found = pair_scales(folder, opened, quantization_of(values))
    parameters = tensor_map.stored_leaves(config)
    prefix = tensor_map.missing_prefix(parameters, found)
    smaller, dropped = tensor_map.drop_optional(config, drop, found, prefix)
    if prefix or smaller != config:
        config, parameters = smaller, tensor_map.stored_leaves(smaller, prefix)
    found = {name: value for name, value in found.items() if name not in dropped}
    tied = tensor_map.tied_names(config, prefix)
    expected = tensor_map.by_name(parameters)
    published = tensor_map.published_names(config, expected, found, prefix)
    found = dict(zip(published, found.values(), strict=True))
    buffer, unread = cast_buffer(), tensor_map.names_of_head(declared, config, found)
    leftovers = tuple(
        name
        for name in found
        if name not in expected
        and (tensor_map.is_leftover(config, prefix + name) or name in unread or is_zero_bias(found, name, buffer))
    )
    known = {name: value for name, value in found.items() if name not in leftovers}
    _compare(folder, expected, tied, known, lambda names: tensor_map.why_wrong(config, names))
    checked = CheckedFolder(config, files, parameters, found, leftovers, tied, prefix)
    return _only(part_of(config, part, folder), part, checked)


def _only(config: Any, part: str | None, checked: CheckedFolder) -> CheckedFolder:
    """The folder with the parameters of the part whose Config this is."""
    if config is checked.config:
        return checked
    chosen = [one for one in checked.parameters if one.path.startswith(f"{part}.")]
    inner = tuple(replace(one, path=one.path.removeprefix(f"{part}.")) for one in chosen)
    return replace(checked, config=config, parameters=inner)


def _compare(
    folder: Path,
    expected: dict[str, list[Piece]],
    tied: dict[str, str],
    found: Found,
    why: Callable[[Iterable[str]], str],
) -> None:
    """MismatchError with every difference between the expected tensors and those in the headers.

    why: what else to say, given the names of tensors with another shape.
    """
    faults, unexpected = [], []
    dtypes: dict[str, tuple[str, torch.dtype]] = {}  # by path, for leaves stacked from several tensors
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
            unexpected.append(f"{name!r} in {file.path.name}: unexpected, {list(entry.shape)} of {_name(entry.dtype)}")
    if faults or unexpected:
        reshaped = (n for n, (piece, *_) in expected.items() if n in found and found[n][1].shape != piece.disk_shape)
        raise MismatchError(
            f"{folder}: the tensors are not those that config.json calls for "
            f"({len(faults) + len(unexpected)} differences):{as_lines(faults)}{as_lines(unexpected)}{why(reshaped)}"
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
    """MismatchError if a redundant tensor on disk (a tied head) is not bit-equal to its original.

    share: (i, n): this is process i of n, which compares the i-th n-th of the bytes.
    """
    for name, twin in tied.items():
        if name in found and not _same(found[name], found[twin], buffer, share):
            raise MismatchError(
                f"{found[name][0].path}: {name} differs from {twin}, but by config.json (tie_word_embeddings, or "
                "num_nextn_predict_layers) they are one tensor."
            )


def _same(one: _Located, two: _Located, buffer: Tensor, share: tuple[int, int]) -> bool:
    """Whether two tensors of one shape have the same bits in this share: NaN equals itself, and -0 is not 0.

    They are read in chunks rather than mapped: a truncated mapped file would kill the process.
    """
    (file, entry), (other, twin) = one, two
    if entry.dtype != twin.dtype:
        return False
    if isinstance(entry, Quantized) or isinstance(twin, Quantized):
        values = [_read(where, None, buffer, None).contiguous().view(torch.uint8) for where in (one, two)]
        return torch.equal(*values)
    halves, size = buffer.chunk(2), entry.stop - entry.start
    first, last = (size * index // share[1] for index in (share[0], share[0] + 1))
    for begin in range(first, last, len(halves[0])):
        count = min(len(halves[0]), last - begin)
        chunks = [half[:count] for half in halves]
        for chunk, source, tensor in ((chunks[0], file, entry), (chunks[1], other, twin)):
            start = tensor.start + begin
            read_into(chunk, source, Entry(torch.uint8, (count,), start, start + count), buffer)
        if not torch.equal(*chunks):
            return False
    return True


def _check_finite(
    folder: Path, chosen: Sequence[StoredLeaf], boxes: dict[str, Box], flat: dict[str, Tensor], found: Found
) -> None:
    """MismatchError naming every leaf with a NaN or an infinity."""
    faults = []
    for parameter in chosen:
        for name, value in _by_name(parameter, boxes[parameter.path], flat[parameter.path]):
            # one pass without a mask as large as the leaf: aminmax propagates NaN
            if value.is_floating_point() and value.numel() and not all(e.isfinite() for e in torch.aminmax(value)):
                count, where = value.numel() - int(value.isfinite().sum()), found[name][0].path.name
                faults.append(f"{name} in {where}: {count:,} of {value.numel():,} values are not finite")
    if faults:
        raise MismatchError(
            f"{folder}: check_finite found NaN or infinities ({len(faults)} tensors):{as_lines(faults)}"
        )


def _by_name(parameter: StoredLeaf, box: Box, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name on disk, values) of the tensors that make up this shard of a parameter."""
    if isinstance(parameter.stored, Stack):
        yield from zip(map(disk_name, parameter.stored.tensors[box[0]]), value, strict=True)
    else:
        yield disk_name(parameter.stored), value


def _target(parameter: StoredLeaf, dtype: torch.dtype | None, found: Found) -> torch.dtype | None:
    if dtype is None and parameter.leaf.keep_dtype:  # e.g. a selection bias: bf16 would round small updates away
        return torch.promote_types(found[storage.disk_names(parameter.stored)[0]][1].dtype, parameter.leaf.dtype)
    return None if dtype is None else leaf_dtype(parameter.leaf, dtype)


@dataclass(frozen=True)
class _Source:
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


def _leaf(parameter: StoredLeaf, box: Box, source: _Source, dtype: torch.dtype | None) -> tuple[Tensor, bool]:
    """(the shard `box` of one parameter, whether it is mapped: no cast, device or layout change is needed)."""
    stored, shape, device = parameter.stored, box_shape(box), source.device
    singles = stored.tensors if isinstance(stored, Stack) else (stored,)
    if 0 in shape:
        on_disk = source.found[disk_name(singles[0])][1].dtype
        return torch.empty(shape, dtype=dtype or on_disk, device=device), False
    if isinstance(stored, Stack):
        sources = [(single, source.found[disk_name(single)]) for single in stored.tensors[box[0]]]
        return _stacked(sources, box, source, dtype), False
    file, entry = source.found[disk_name(stored)]
    if isinstance(entry, Entry):
        region = storage.disk_region(stored, box)
        contiguous = contiguous_entry(entry, region.box) if isinstance(region.stored, str) else None
        if dtype in (None, entry.dtype) and device.type == "cpu" and not source.copy:
            # Contiguous bytes get a storage of their own: a view into a fused tensor would keep all of it alive
            # and be copied with it.
            if contiguous is not None:
                return mapped_tensor(source.mapping(file), contiguous), True
            if box == _full_box(parameter) and not _interleaved(stored):
                return storage.extract(stored, mapped_tensor(source.mapping(file), entry)), True
        # Read rather than mapped, so that mapped pages do not add to the memory of the result.
        if contiguous is not None:
            return read_tensor(file, contiguous, dtype, source.buffer).to(device), False
    elif isinstance(stored, str):
        return read_quantized(file, entry, dtype, source.buffer, box).to(device), False
    if isinstance(stored, TensorSlice) and stored.batched:
        one = replace(stored, batched=False)
        return _stacked([(one, (file, matrix)) for matrix in split_rows(entry, box[0])], box, source, dtype), False
    out = torch.empty(shape, dtype=dtype or entry.dtype, device=device)
    _fill(out, stored, box, (file, entry), dtype, source.buffer)
    return out, False


def _stacked(
    sources: Sequence[tuple[Single, _Located]], box: Box, source: _Source, dtype: torch.dtype | None
) -> Tensor:
    """The shard [E, ...] of a stacked parameter in one allocation, filled expert by expert."""
    out = torch.empty(box_shape(box), dtype=dtype or sources[0][1][1].dtype, device=source.device)
    for target, (single, where) in zip(out, sources, strict=True):
        _fill(target, single, box[1:], where, dtype, source.buffer)
    return out


def _fill(out: Tensor, stored: Single, box: Box, where: _Located, dtype: torch.dtype | None, buffer: Tensor) -> None:
    """Read the shard `box` of what is one tensor on disk (or one slice of a batched one) into `out`."""
    region, (file, entry) = storage.disk_region(stored, box), where
    if isinstance(region.stored, str) and isinstance(entry, Entry) and out.device.type == "cpu":
        read_box(out, file, entry, region.box, buffer)
    else:
        storage.extract_into(out, region.stored, _read(where, dtype, buffer, region.box), region.skip)


def _read(where: _Located, dtype: torch.dtype | None, buffer: Tensor, box: Box | None) -> Tensor:
    """A tensor or its shard `box` in the file's dtype; a quantized one dequantized to `dtype`."""
    file, entry = where
    if isinstance(entry, Quantized):
        return read_quantized(file, entry, dtype, buffer, box)
    return read_tensor(file, entry, None, buffer, box)


def _interleaved(stored: Single) -> bool:
    """Whether its rows are interleaved with another's, so that `extract` has to copy, and reading beats mapping."""
    return isinstance(stored, TensorSlice) and stored.groups > 1

"""Quantized weights in files: their tensors, paired by name and checked by their headers, and read dequantized."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fnmodels.errors import MismatchError
from params.io.safetensors_file import Box, TensorEntry, TensorFile, box_shape, read_tensor, row_entries

from .declared import UNDECLARED, Declaration, Described, Quantization
from .form import Axis, Form, Part, Region
from .forms import FP8, SHARD

WORDS = (torch.bfloat16, torch.float16, torch.float32)  # that files may hold codes of bytes in
_DESCRIPTION = 64  # integers of a tensor that says again what the form is; the longest one is the name of a packing
CHUNK = 1 << 18  # elements dequantized at a time, few enough to stay in cache; ten bytes of temporary memory for each

Located = tuple[TensorFile, TensorEntry]


@dataclass(frozen=True)
class QuantizedWeight:
    """A quantized weight in the files. shape and dtype are those of the dequantized one.

    parts: its tensors by the ending of their names, with the shape that the form gives them. numbers: the values of
    parts that are no tensors. name: in the files. shapes: of the parts in the files. beside: tensors that say nothing
    of the values, by their names within the module. declaration: what says that it is quantized.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    form: Form
    parts: Mapping[str, Located]
    numbers: Mapping[str, float] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    beside: Mapping[str, Located] = field(default_factory=dict)
    declaration: Declaration = UNDECLARED

    @property
    def module(self) -> str:
        """The prefix of the names of its module's tensors."""
        return self.name.rpartition(".")[0] + "."

    @property
    def stem(self) -> str:
        """The prefix of the names of all parts."""
        return self.name.removesuffix(self.form.weight)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns as in the file."""
        *_, rows, columns = self.shape
        return (columns, rows) if self.form.turned else (rows, columns)


Found = dict[str, tuple[TensorFile, TensorEntry | QuantizedWeight]]


def pair(found: Mapping[str, Located], quantization: Quantization, buffer: Tensor) -> tuple[Found, list[str]]:
    """(`found` with the tensors of each quantized weight as one `QuantizedWeight`, what is wrong with them)."""
    found = _with_scales_of_shards(_as_bytes(found, quantization))
    paired: Found = {**found}
    faults: list[str] = []
    for name in found:
        if name.endswith(quantization.ignored):
            paired.pop(name, None)
    for name, (file, entry) in found.items():
        if quantization.is_beside_codes(name, found):
            continue
        each = list(quantization.candidates(name, found, buffer))
        complete = [described for described in each if _has_all(described, name, found)]
        candidates = [
            attempt
            for described in complete or each
            if (attempt := _attempt(name, entry, described, found, quantization, buffer)) is not None
        ]
        if not candidates:
            continue
        weight, wrong = min(candidates, key=lambda each: len(each[1]))
        fitting = {each.shape: each.form.name for each, its_faults in candidates if not its_faults}
        if len(fitting) > 1:
            wrong = [f"{name!r} in {file.path.name}: its shape fits both {' and '.join(fitting.values())}"]
        if weight.name != name and weight.name in found:
            wrong = [*wrong, f"{name!r} in {file.path.name}: {weight.name!r} is there as well, and only one is meant"]
        faults += wrong
        for ending in (*weight.parts, *weight.form.descriptions):
            paired.pop(weight.stem + ending, None)
        beside = (weight.stem + ending for ending in weight.form.descriptions)
        module = weight.module.removesuffix(".")
        names = [*beside, *(module + ending for ending in quantization.ignored)]
        located = {name.removeprefix(weight.module): found[name] for name in names if name in found}
        paired[weight.name] = (file, replace(weight, beside=located))
    return paired, faults


def _as_bytes(found: Mapping[str, Located], quantization: Quantization) -> dict[str, Located]:
    """`found` with codes of bytes as such where a file has them in words of another dtype.

    bitsandbytes' `quant_storage` does so, in which FSDP shards them; the tensor of a state says that they are codes.
    """
    out = dict(found)
    for form in quantization.forms:
        if form.state and form.codes.dtypes == (torch.uint8,) and not form.codes.ending:
            for name in (state.removesuffix(form.state) for state in found if state.endswith(form.state)):
                file, entry = found.get(name, (None, None))
                if file is not None and entry is not None and entry.dtype in WORDS:
                    out[name] = (file, replace(entry, dtype=torch.uint8, shape=(entry.stop - entry.start, 1)))
    return out


def _with_scales_of_shards(found: dict[str, Located]) -> dict[str, Located]:
    """`found` with the scale of a table, X.weight_scale, as that of each of the tensors X.shard_0.weight to the last.

    Qwen's tables of n-grams are such: fp8 with one scale for all shards.
    """
    out = dict(found)
    for name, (_, entry) in found.items():
        table = re.sub(SHARD, ".", name) + "_scale"
        if entry.dtype in FP8 and table in found and re.search(SHARD, name):
            out[f"{name}_scale"] = found[table]
            out.pop(table, None)
    return out


def is_zero_bias(found: Found, name: str, buffer: Tensor) -> bool:
    """Whether `name` is a bias that nobody reads, and all zeros.

    That is one of a quantized weight, since GPTQ's quantizers wrote one for every module, or of a router's choice.
    """
    module, _, last = name.rpartition(".")
    file, entry = found[name]
    if last == "e_score_correction_bias" and not isinstance(entry, QuantizedWeight):
        return not read_tensor(file, entry, None, buffer).any()
    weight = found.get(f"{module}.weight", (None, None))[1]
    if last != "bias" or not isinstance(weight, QuantizedWeight) or isinstance(entry, QuantizedWeight):
        return False
    return entry.shape == weight.shape[:1] and not read_tensor(file, entry, None, buffer).any()


def _has_all(described: Described, name: str, found: Mapping[str, Located]) -> bool:
    """Whether the files have all tensors that a weight of this form needs, whose codes are `name`."""
    form, numbers = described.form, dict(described.numbers)
    stem = name.removesuffix(form.codes.ending)
    return all(stem + ending in found or ending in numbers for ending in form.needed)


def _attempt(
    name: str,
    entry: TensorEntry,
    described: Described,
    located: Mapping[str, Located],
    quantization: Quantization,
    buffer: Tensor,
) -> tuple[QuantizedWeight, list[str]] | None:
    """The weight that a tensor is the codes of in this form and what is wrong with it; None: it is no such tensor."""
    form, shape = described.form, described.shape
    numbers = dict(described.numbers)
    codes, stem = form.codes, name.removesuffix(form.codes.ending)
    if (form.weight and not stem.endswith(".")) or (len(entry.shape) < 2 and not form.width):
        return None
    others = quantization.code_endings - {codes.ending, ""}
    if any(name.endswith(ending) and name.removesuffix(ending) + codes.ending in located for ending in others):
        return None  # they are the codes of another form
    where = f"{name!r} in {located[name][0].path.name}"
    size = _canonical(entry.shape, codes)
    if shape is None:
        if size is None:
            text = f"{list(entry.shape)} of {_name(entry.dtype)}"
            words = "two dimensions" if not codes.pieces else f"[.., out, in / 32, {codes.pieces}]"
            return QuantizedWeight(stem + form.weight, entry.shape, entry.dtype, form, {codes.ending: located[name]}), [
                f"{where}: expected {words} of {_name(codes.dtypes[0])}, found {text}"
            ]
        *lead, rows, columns = size
        shape = (codes.rows.size(rows), codes.columns.size(columns))
    else:
        lead = []
    parts: dict[str, Located] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    faults: list[str] = []
    missing: list[str] = []
    for part, row_axes, column_axes in form.parts():
        if part.ending in numbers:
            continue
        if stem + part.ending not in located:
            missing += [repr(stem + part.ending)] if part.needed else []
            continue
        file, stored = located[stem + part.ending]
        height, width = form.matrix(shape)
        expected = _file_shape((*lead, _count(row_axes, height), _count(column_axes, width)), part)
        if stored.dtype not in part.dtypes or not _fits(stored.shape, expected, part, form):
            shown = [n for n in expected if n != 1] if len(stored.shape) < len(expected) else list(expected)
            faults.append(
                f"{stem + part.ending!r} in {file.path.name}: expected {shown} of "
                f"{' or '.join(map(_name, part.dtypes))} in {form.name}, found {list(stored.shape)} of "
                f"{_name(stored.dtype)}"
            )
        shapes[part.ending] = stored.shape
        parts[part.ending] = (file, replace(stored, shape=stored.shape if part.padded else expected))
    missing += [repr(stem + form.state)] if form.state and stem + form.state not in located else []
    if missing:
        faults.append(f"{where}: {_name(entry.dtype)} in {form.name}, but missing are {', '.join(missing)}")
    faults += _contradictions(form, stem, located, buffer)
    rows, columns = shape
    full = (*lead, columns, rows) if form.turned else (*lead, rows, columns)
    dtype, declaration = _dtype(form, parts, quantization), quantization.declaration
    return QuantizedWeight(stem + form.weight, full, dtype, form, parts, numbers, shapes, {}, declaration), faults


def _contradictions(form: Form, stem: str, located: Mapping[str, Located], buffer: Tensor) -> Iterator[str]:
    """What is wrong with the tensors that say again what the form is: one that says something else."""
    for ending, integers in form.repeated:
        if stem + ending not in located:
            continue
        file, entry = located[stem + ending]
        count = math.prod(entry.shape)
        held = read_tensor(file, entry, None, buffer).flatten().tolist() if count <= _DESCRIPTION else []
        if tuple(held) != integers:
            found = _spoken(held) if held else f"{count:,} numbers"
            yield f"{stem + ending!r} in {file.path.name}: expected {_spoken(integers)} in {form.name}, found {found}"


def _spoken(numbers: Iterable[float]) -> str:
    """The numbers of a tensor for a message; several that are letters as the text."""
    listed = list(numbers)
    if len(listed) > 1 and all(number in range(32, 127) for number in listed):
        return repr("".join(chr(int(number)) for number in listed))
    return ", ".join(f"{number:g}" for number in listed)


def _dtype(form: Form, parts: Mapping[str, Located], quantization: Quantization) -> torch.dtype:
    scales = form.scales
    if form.dtype is not None or not isinstance(scales, Part) or scales.ending not in parts:
        return quantization.dtype
    return parts[scales.ending][1].dtype


def _canonical(shape: tuple[int, ...], codes: Part) -> tuple[int, ...] | None:
    """[.., rows, columns] of entries of codes; None for shapes that cannot be."""
    if codes.pieces:
        if len(shape) < 3 or shape[-1] != codes.pieces:
            return None
        shape = (*shape[:-2], shape[-2] * shape[-1])
    if len(shape) < 2 or (codes.inputs_first and len(shape) > 2):
        return None
    if codes.inputs_first:
        shape = (*shape[:-2], shape[-1], shape[-2])
    if shape[-1] % codes.columns.entries or shape[-2] % codes.rows.entries:
        return None
    return shape


def _count(axes: Iterable[Axis], size: int) -> int:
    for axis in axes:
        size = axis.count(size)
    return size


def _file_shape(shape: tuple[int, ...], part: Part) -> tuple[int, ...]:
    *lead, rows, columns = shape
    return (*lead, columns, rows) if part.inputs_first else (*lead, rows, columns)


def _fits(shape: tuple[int, ...], expected: tuple[int, ...], part: Part, form: Form) -> bool:
    if part.padded:
        return len(shape) == len(expected) and shape[:-1] == expected[:-1] and shape[-1] >= expected[-1]
    if part.pieces:
        shape = (*shape[:-2], shape[-2] * shape[-1])
    if len(shape) == len(expected) and form.width >= 0:
        return shape == expected
    return [n for n in shape if n != 1] == [n for n in expected if n != 1]  # without dimensions of size 1


def matrices(weight: QuantizedWeight, rows: slice = slice(None)) -> list[QuantizedWeight]:
    """One weight per index of the first dimension, or of those in `rows`."""
    each = {ending: row_entries(entry, rows) for ending, (_, entry) in weight.parts.items()}
    return [
        replace(
            weight,
            shape=weight.shape[1:],
            parts={ending: (weight.parts[ending][0], entries[i]) for ending, entries in each.items()},
        )
        for i in range(len(range(weight.shape[0])[rows]))
    ]


@dataclass(frozen=True)
class FileReader:
    """The parts of a weight [rows, columns] in files, see `form.Reader`."""

    weight: QuantizedWeight
    buffer: Tensor
    checks: bool = True

    def has(self, part: Part) -> bool:
        return part.ending in self.weight.parts or part.ending in self.weight.numbers

    def columns(self, part: Part) -> int:
        shape = self.weight.parts[part.ending][1].shape
        return shape[-2] if part.inputs_first else shape[-1]

    def read(self, part: Part, region: Region) -> Tensor:
        if part.ending in self.weight.numbers:
            return torch.full((1, 1), self.weight.numbers[part.ending])
        file, entry = self.weight.parts[part.ending]
        if part.inputs_first:
            return read_tensor(file, entry, None, self.buffer, region[::-1]).mT
        return read_tensor(file, entry, None, self.buffer, region)

    def refuse(self, part: Part, what: str) -> None:
        file, _ = self.weight.parts[part.ending]
        raise MismatchError(f"{file.path}: {self.weight.stem + part.ending!r}: {what}.")


def read_quantized(
    weight: QuantizedWeight, dtype: torch.dtype | None, buffer: Tensor, box: Box | None = None
) -> Tensor:
    """The dequantized weight, or its shard `box`, in new memory; products are taken in fp32, then rounded to dtype.

    For a shard, all groups that it touches are read. dtype None: that of the weight. MismatchError for scales that no
    quantizer writes and groups that do not exist.
    """
    box = tuple(slice(0, n) for n in weight.shape) if box is None else box
    box = (*box[:-2], box[-1], box[-2]) if weight.form.turned else box  # in the order of the file
    out = torch.empty(box_shape(box), dtype=dtype or weight.dtype, device="cpu")
    _fill(out, box, weight, buffer)
    return out.mT if weight.form.turned else out


def _fill(target: Tensor, box: Box, weight: QuantizedWeight, buffer: Tensor) -> None:
    if target.ndim > 2:
        for matrix, weights in zip(target, matrices(weight, box[0]), strict=True):
            _fill(matrix, box[1:], weights, buffer)
        return
    (rows, columns), form, reader = box, weight.form, FileReader(weight, buffer)
    for region in regions(form, (rows, columns), CHUNK):
        values = form.values(reader, weight.matrix_shape, region)
        target[_within(region[0], rows), _within(region[1], columns)] = values


def regions(form: Form, region: Region, chunk: int) -> Iterator[Region]:
    """The region in parts of about `chunk` elements, cut along the first dimension of the file's codes."""
    rows, columns = region
    along, across = (columns, rows) if form.codes.inputs_first else (rows, columns)
    step = form.step(along.stop, across.stop - across.start, chunk)
    for begin in range(along.start // step * step, along.stop, step):
        part = slice(max(begin, along.start), min(begin + step, along.stop))
        yield (rows, part) if form.codes.inputs_first else (part, columns)


def _within(part: slice, outer: slice) -> slice:
    return slice(part.start - outer.start, part.stop - outer.start)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Dequantization of weights that are 4 or 8 bit integers: value = (code - zero) * scale, one scale per group of inputs.

    method          codes of X.weight [out, in]             zeros                          scales
    gptq            qweight [in / p, out]                   qzeros [G, out / p], less 1    scales [G, out]
    awq             qweight [in, out / p]                   qzeros [G, out / p]            scales [G, out]
    pack-quantized  weight_packed [out, in / p]             weight_zero_point [out / p, G] weight_scale [out, G]
    int-quantized   weight [out, in] int8                   weight_zero_point [out, G]     weight_scale [out, G]

The files hold X.qweight and so on; p = 32 / bits integers are packed into an int32, the first in its lowest bits, but
awq has them in the order AWQ_ORDER. Input i is in group i // group, or in group g_idx[i] where that tensor is there
(gptq with desc_act, and compressed-tensors' weight_g_idx). gptq's zeros are stored less 1, modulo 2^bits; those of
its second version (checkpoint_format "gptq_v2") are stored as they are. compressed-tensors packs signed integers plus
2^(bits - 1); its zeros are 0 where they are missing, and may be int8 that are not packed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels.errors import MismatchError
from fnmodels.models.common.quantization import Quantization
from params.io.safetensors_file import Box, TensorEntry, TensorFile, read_tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of 8 neighbours, the one in each 4 bits of a word, lowest first
SCALES = (torch.float16, torch.bfloat16, torch.float32)
INDICES = (torch.int32, torch.int64)
CHUNK = 1 << 20  # elements dequantized at a time

Located = tuple[TensorFile, TensorEntry]


@dataclass(frozen=True)
class Form:
    """The names of a weight's tensors and their layout, as in the table above.

    inputs_first: codes are [in, out], scales and zeros [G, out]; else transposed. axis, zeros_axis: the dimension along
    which codes and zeros are packed; None: int8, not packed. order: which neighbour is in each place of a word.
    shape: the name of the tensor that holds [out, in].
    """

    codes: str
    scales: str
    zeros: str
    index: str | None
    inputs_first: bool
    axis: int | None
    zeros_axis: int | None
    order: tuple[int, ...] | None = None
    shape: str | None = None


_COMPRESSED = ("weight_scale", "weight_zero_point", "weight_g_idx", False)
FORMS = {
    "gptq": Form("qweight", "scales", "qzeros", "g_idx", True, 0, 1),
    "awq": Form("qweight", "scales", "qzeros", None, True, 1, 1, order=AWQ_ORDER),
    "pack-quantized": Form("weight_packed", *_COMPRESSED, 1, 0, shape="weight_shape"),
    "int-quantized": Form("weight", *_COMPRESSED, None, None),
}


@dataclass(frozen=True)
class IntegerWeight:
    """A weight [out, in] as integers in the files; dtype is that of its scales.

    tensors: its tensors by the last component of their names.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    module: str
    tensors: Mapping[str, Located]
    quantization: Quantization

    @property
    def form(self) -> Form:
        return FORMS[self.quantization.method]

    @property
    def groups(self) -> int:
        """How many groups the inputs are divided into."""
        return -(-self.shape[1] // (self.quantization.group or self.shape[1] or 1))


def pair_integers(
    found: Mapping[str, Located], quantization: Quantization
) -> tuple[dict[str, Located | tuple[TensorFile, IntegerWeight]], list[str]]:
    """(`found` with the tensors of each integer weight X as one "X.weight", what is wrong with them)."""
    paired: dict[str, Located | tuple[TensorFile, IntegerWeight]] = {**found}
    form, faults = FORMS[quantization.method], []
    for name, (file, entry) in found.items():
        module, _, last = name.rpartition(".")
        if last != form.codes or (form.axis is None and entry.dtype != torch.int8):
            continue
        names = (form.codes, form.scales, form.zeros, form.index, form.shape)
        tensors = {one: found[f"{module}.{one}"] for one in names if one and f"{module}.{one}" in found}
        weight, wrong = _weight(module, tensors, quantization)
        faults += wrong
        if form.codes != "weight" and f"{module}.weight" in found:
            faults.append(
                f"{name!r} in {file.path.name}: '{module}.weight' is there as well, and only one can be meant"
            )
        for one in tensors:
            del paired[f"{module}.{one}"]
        if weight is not None:
            paired[f"{module}.weight"] = (file, weight)
    return paired, faults


def _weight(
    module: str, tensors: dict[str, Located], quantization: Quantization
) -> tuple[IntegerWeight | None, list[str]]:
    """The weight of a module, and what is wrong with its tensors, from their headers alone."""
    form, count = FORMS[quantization.method], 32 // quantization.bits
    file, codes = tensors[form.codes]
    needed = [form.scales, form.shape]
    needed += [] if quantization.symmetric else [form.zeros]
    needed += [form.index] if quantization.indexed else []
    missing = [f"{module}.{one}" for one in needed if one and one not in tensors]
    if missing:
        return None, [f"'{module}.{form.codes}' in {file.path.name}: missing are {', '.join(map(repr, missing))}"]
    if len(codes.shape) != 2 or codes.dtype != (torch.int8 if form.axis is None else torch.int32):
        text = f"{list(codes.shape)} of {_name(codes.dtype)}"
        return None, [f"'{module}.{form.codes}' in {file.path.name}: expected two dimensions of int32, found {text}"]
    size = tuple(n * count if axis == form.axis else n for axis, n in enumerate(codes.shape))
    shape = (size[1], size[0]) if form.inputs_first else (size[0], size[1])
    weight = IntegerWeight(shape, tensors[form.scales][1].dtype, module, tensors, quantization)
    scales = (weight.groups, shape[0]) if form.inputs_first else (shape[0], weight.groups)
    zeros = tuple(-(-n // count) if axis == form.zeros_axis else n for axis, n in enumerate(scales))
    # compressed-tensors' earlier versions wrote zeros that are not packed
    unpacked = form.zeros in tensors and not form.inputs_first and tensors[form.zeros][1].dtype == torch.int8
    wanted = {
        form.scales: (scales, SCALES),
        form.zeros: (scales, (torch.int8,)) if unpacked or form.axis is None else (zeros, (torch.int32,)),
        form.index: ((shape[1],), INDICES),
        form.shape: ((2,), INDICES),
    }
    faults = [
        f"'{module}.{one}' in {where.path.name}: expected {list(wanted[one][0])} of "
        f"{' or '.join(map(_name, wanted[one][1]))}, found {list(entry.shape)} of {_name(entry.dtype)}"
        for one, (where, entry) in tensors.items()
        if one != form.codes and (entry.shape != wanted[one][0] or entry.dtype not in wanted[one][1])
    ]
    return weight, faults


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_zero_bias(found: Mapping[str, tuple[TensorFile, object]], name: str, buffer: Tensor) -> bool:
    """Whether `name` is the bias of an integer weight and all zeros: GPTQ's quantizers wrote one for every module."""
    module, _, last = name.rpartition(".")
    file, entry = found[name]
    weight = found.get(f"{module}.weight", (None, None))[1]
    if last != "bias" or not isinstance(weight, IntegerWeight) or not isinstance(entry, TensorEntry):
        return False
    return entry.shape == weight.shape[:1] and not read_tensor(file, entry, None, buffer).any()


def read_integer_weight(weight: IntegerWeight, dtype: torch.dtype | None, buffer: Tensor, box: Box | None) -> Tensor:
    """The weight [out, in], or its shard `box`, in new memory; products are taken in fp32. dtype None: the scales'.

    MismatchError for scales that are not finite, groups that do not exist, and another shape than the file says.
    """
    form = weight.form
    outputs, inputs = box or (slice(0, weight.shape[0]), slice(0, weight.shape[1]))
    _check_shape(weight, buffer)
    groups = _group_of_inputs(weight, buffer)[inputs]
    every = slice(0, weight.groups)
    region = (every, outputs) if form.inputs_first else (outputs, every)
    scales = read_tensor(*weight.tensors[form.scales], torch.float32, buffer, region)
    if not scales.isfinite().all():
        raise MismatchError(f"{_where(weight, form.scales)} has scales that are not finite.")
    zeros = _zeros(weight, region, buffer)
    out = torch.empty(outputs.stop - outputs.start, inputs.stop - inputs.start, dtype=dtype or weight.dtype)
    target, (rows, columns) = (out.mT, (inputs, outputs)) if form.inputs_first else (out, (outputs, inputs))
    step = max(1, CHUNK // max(1, target.shape[1])) + 7 & -8  # a multiple of the integers in a word
    for begin in range(0, len(target), step):
        end = min(begin + step, len(target))
        chunk = (slice(rows.start + begin, rows.start + end), columns)
        codes = _integers(weight, form.codes, chunk, form.axis, buffer).float()
        if form.inputs_first:
            shift, scale = (t.index_select(0, groups[begin:end]) for t in (zeros, scales))
        else:
            shift, scale = (t[begin:end].index_select(1, groups) for t in (zeros, scales))
        target[begin:end] = codes.sub_(shift).mul_(scale)
    return out


def _zeros(weight: IntegerWeight, region: Box, buffer: Tensor) -> Tensor:
    """fp32, the code that stands for 0 in each group and output of `region`."""
    form, bits = weight.form, weight.quantization.bits
    middle = 0 if form.axis is None else 1 << bits - 1
    if form.zeros not in weight.tensors:
        return torch.full([extent.stop - extent.start for extent in region], float(middle))
    if weight.tensors[form.zeros][1].dtype == torch.int8:
        return _integers(weight, form.zeros, region, None, buffer).float() + middle
    zeros = _integers(weight, form.zeros, region, form.zeros_axis, buffer)
    return (zeros + weight.quantization.zero_offset & (1 << bits) - 1).float()


def _integers(weight: IntegerWeight, name: str, region: Box, axis: int | None, buffer: Tensor) -> Tensor:
    """The integers in a region of codes or zeros [rows, columns], unpacked along `axis`; int32, or int8 with None."""
    file, entry = weight.tensors[name]
    if axis is None:
        return read_tensor(file, entry, None, buffer, region)
    bits, extent = weight.quantization.bits, region[axis]
    count = 32 // bits
    words = slice(extent.start // count, -(-extent.stop // count))
    read = read_tensor(file, entry, None, buffer, (*region[:axis], words, *region[axis + 1 :]))
    order = weight.form.order or range(count)
    shifts = torch.tensor([bits * order.index(neighbour) for neighbour in range(count)], dtype=torch.int32)
    integers = (read.unsqueeze(axis + 1) >> shifts.view(-1, *[1] * (1 - axis))) & (1 << bits) - 1
    return integers.flatten(axis, axis + 1).narrow(axis, extent.start - words.start * count, extent.stop - extent.start)


def _group_of_inputs(weight: IntegerWeight, buffer: Tensor) -> Tensor:
    """int64 [in], the group of each input."""
    inputs, name = weight.shape[1], weight.form.index
    if name is None or name not in weight.tensors:
        return torch.arange(inputs) // (weight.quantization.group or max(1, inputs))
    groups = read_tensor(*weight.tensors[name], torch.int64, buffer)
    outside = (groups < 0) | (groups >= weight.groups)
    if outside.any():
        raise MismatchError(
            f"{_where(weight, name)} has {int(outside.sum()):,} groups, {int(groups[outside][0])} for one, that are "
            f"not from 0 to {weight.groups - 1}."
        )
    return groups


def _check_shape(weight: IntegerWeight, buffer: Tensor) -> None:
    if weight.form.shape is None:
        return
    shape = read_tensor(*weight.tensors[weight.form.shape], None, buffer).tolist()
    if shape != list(weight.shape):
        raise MismatchError(f"{_where(weight, weight.form.shape)} is {shape}, but the codes are {list(weight.shape)}.")


def _where(weight: IntegerWeight, name: str) -> str:
    return f"{weight.tensors[name][0].path}: '{weight.module}.{name}'"

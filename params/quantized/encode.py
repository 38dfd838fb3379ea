"""Kept weights with other values: each rounded to the nearest code of the form, with the scales and zeros as they are.

It is the inverse of reading for every form, so a weight that has not changed keeps its bytes. What lies beyond the
codes of its block becomes the last of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.errors import MismatchError, UnsupportedError
from fnmodels.tree import Tree

from .decode import E2M1, PackedIntegers, Slabs, e2m1, floats
from .form import Form, Part
from .kept import KeptWeight


def requantize(params: Tree, like: Tree) -> Tree:
    """Puts weights back into the form in which a file stores them: after training, for saving it so.

    Each value is rounded to the nearest that the weight's stored scales and zeros can express; values beyond the range
    of their block are set to its end. Scales, zeros and group order stay those of `like`.

    Args:
        params: Plain weights, as `lora.merge` gives them; a weight that is kept already stays what it is.
        like: The tree that `load_pretrained(keep_quantized=True)` read.

    Returns:
        The tree, with kept weights where `like` has them.

    Raises:
        MismatchError: The trees are of different models.
        UnsupportedError: `like` is of a GGUF file, to whose types nothing is rounded.
    """
    if isinstance(like, KeptWeight):
        if isinstance(params, KeptWeight):
            return params
        if not isinstance(params, Tensor) or params.shape != like.shape:
            raise MismatchError(f"`like` has a weight {list(like.shape)} where `params` has {_described(params)}.")
        return encoded(like, params)
    if isinstance(like, dict) and isinstance(params, dict) and like.keys() == params.keys():
        return {name: requantize(value, like[name]) for name, value in params.items()}
    if isinstance(like, list) and isinstance(params, list) and len(like) == len(params):
        return [requantize(value, other) for value, other in zip(params, like, strict=True)]
    if isinstance(like, (dict, list)):
        raise MismatchError("`params` and `like` are trees of different models, or `params` has adapters: merge them.")
    return params


def _described(value: object) -> str:
    return f"{list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


@torch.no_grad()
def encoded(weight: KeptWeight, values: Tensor) -> KeptWeight:
    """A weight with the codes nearest to `values`, and all else of `weight`."""
    if weight.ndim > 2:
        each = [encoded(matrix, value) for matrix, value in zip(weight.unbind(), values, strict=True)]
        codes = torch.stack([matrix.parts[0] for matrix in each])
    else:
        codes = _codes(weight, values)
    return replace(weight, parts=(codes, *weight.parts[1:]))


def _codes(weight: KeptWeight, values: Tensor) -> Tensor:
    form, stored = weight.form, weight.parts[0]
    zero, unit = (_at_code(weight, code) for code in (0.0, 1.0))
    step = unit - zero  # values are linear in their codes
    targets = torch.where(step == 0, 0, (values.float() - zero) / step)
    height, width = form.matrix((values.shape[0], values.shape[1]))
    targets = F.pad(targets.flatten(), (0, height * width - targets.numel())).view(height, width)
    if form.table is not None:
        entries = _from_table(targets, weight.reader().read(form.table, (slice(0, 1), slice(None))).flatten())
    else:
        turned = stored.mT if form.codes.inputs_first else stored
        entries = _encode(form, targets, turned.dtype, turned.shape[0])
    return (entries.mT if form.codes.inputs_first else entries).reshape(stored.shape).contiguous()


@dataclass(frozen=True)
class _Constant:
    """A decoder of which every number is `value`; part: whose shapes it has."""

    value: float
    part: Part

    def __call__(self, raw: Tensor) -> Tensor:
        return torch.full_like(self.part.decode(raw), self.value, dtype=torch.float32)


def _at_code(weight: KeptWeight, code: float) -> Tensor:
    """The values of the weight if every code were `code`."""

    def constant(part: Part) -> Part:
        return replace(part, decode=_Constant(code, part))

    form: Form = weight.form
    if form.table is not None:
        form = replace(form, table=constant(form.table))
    else:
        form = replace(form, codes=constant(form.codes))
    rows, columns = weight.shape
    return form.values(weight.reader(), (rows, columns), (slice(0, rows), slice(0, columns)))


def _from_table(targets: Tensor, table: Tensor) -> Tensor:
    """Bytes of two indices of a table of 16, the upper half first: those of the nearest numbers."""
    ordered, places = table.sort()
    above = torch.searchsorted(ordered, targets.contiguous()).clamp(1, len(table) - 1)
    nearer = targets - ordered[above - 1] <= ordered[above] - targets
    indices = places[torch.where(nearer, above - 1, above)]
    pairs = indices.view(len(indices), -1, 2)
    return (pairs[..., 0] << 4 | pairs[..., 1]).to(torch.uint8)


def _encode(form: Form, targets: Tensor, dtype: torch.dtype, rows: int) -> Tensor:
    """The entries of codes [rows, ..] for numbers of each element."""
    decode = form.codes.decode
    if isinstance(decode, PackedIntegers):
        low = -(1 << decode.bits - 1) if decode.signed else 0
        integers = targets.round().clamp(low, low + (1 << decode.bits) - 1).long()
        return _packed(decode, integers - decode.offset & (1 << decode.bits) - 1, dtype)
    if isinstance(decode, Slabs):
        integers = targets.round().clamp(0, (1 << decode.bits) - 1).long()
        slabs = F.pad(integers, (0, 0, 0, rows * decode.count - len(integers))).unflatten(0, (decode.count, rows))
        return sum(slab << shift for slab, shift in zip(slabs, decode.shifts(), strict=True)).to(dtype)
    if decode is e2m1:
        table = torch.tensor(E2M1)
        size = targets.abs().contiguous()
        above = torch.searchsorted(table, size).clamp(1, len(table) - 1)
        codes = torch.where(size - table[above - 1] <= table[above] - size, above - 1, above)
        pairs = (codes | targets.signbit().long() << 3).view(len(codes), -1, 2)
        return (pairs[..., 0] | pairs[..., 1] << 4).to(torch.uint8).view(dtype)
    if decode is not floats:
        raise UnsupportedError(f"Values are not rounded to {form.name}: dequantize the weight, and save it plain.")
    if dtype.is_floating_point:
        return targets.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    return targets.round().clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max).to(dtype)


def _packed(how: PackedIntegers, integers: Tensor, dtype: torch.dtype) -> Tensor:
    """Words of packed integers, the inverse of `PackedIntegers`."""
    if how.dim == 0:
        return _packed(replace(how, dim=1), integers.mT, dtype).mT
    size = dtype.itemsize * 8
    if size % how.bits == 0:
        count = size // how.bits
        order = how.order or range(count)
        groups = F.pad(integers, (0, -integers.shape[1] % count)).unflatten(1, (-1, count))
        words = sum(groups[..., i] << how.bits * order.index(i) for i in range(count))
    else:
        groups = F.pad(integers, (0, -integers.shape[1] % 32)).unflatten(1, (-1, 32))
        each = [torch.zeros_like(groups[..., 0]) for _ in range(how.bits + 1)]
        for i in range(32):
            word, shift = divmod(i * how.bits, 32)
            shifted = groups[..., i] << shift
            each[word], each[word + 1] = each[word] | shifted & 0xFFFFFFFF, each[word + 1] | shifted >> 32
        words = torch.stack(each[: how.bits], -1).flatten(1)
    assert isinstance(words, Tensor)
    if dtype in (torch.int32, torch.uint32):
        return words.to(torch.int32).view(dtype)
    return words.to(torch.uint8).view(dtype)

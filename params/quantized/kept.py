"""`KeptWeight`: a weight that stays as its file has it, and is dequantized whenever it is used.

Memory is that of the file, and of one dequantized weight (one expert's) while it is used; a gradient dequantizes it
again. Products are those of the dequantized weight, to the bit. F.linear and layers with experts know such leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.models.common.storage import Single, Stack, Stored, TensorSlice, disk_name
from fnmodels.ops.linear import linear
from fnmodels.tree import Tree, pytree, static

from .form import Axis, Form, Part, Region
from .weight import CHUNK, FileReader, Found, QuantizedWeight, matrices, regions

NOT_LINEAR = ("kv_b_proj", "patch_proj")  # latent attention reads its rows apart, and it may be a convolution's


def may_stay(path: str, shape: tuple[int, ...]) -> bool:
    """Whether the leaf at `path` is applied by F.linear, or by a layer with experts."""
    name = path.rpartition(".")[2]
    if len(shape) == 2:
        return path.endswith(("_proj", "lm_head")) and name not in NOT_LINEAR
    return len(shape) == 3 and ".experts." in path and path.endswith("_proj")


@pytree
@dataclass(frozen=True, eq=False)
class KeptWeight:
    """A weight [out, in], or those of experts [E, out, in], in the storage form of its file.

    parts: in the order of the form's, None for those that the file does not have; with experts [E, ...].
    dtype: of the dequantized weight.
    """

    parts: tuple[Tensor | None, ...]
    form: Form = static()
    shape: tuple[int, ...] = static()
    dtype: torch.dtype = static()
    invariant: ClassVar[bool] = True  # its products are those of fnmodels.ops.linear

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def device(self) -> torch.device:
        return next(part.device for part in self.parts if part is not None)

    @property
    def nbytes(self) -> int:
        """Of its parts."""
        return sum(part.nbytes for part in self.parts if part is not None)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """F.linear(x, self, bias); torch raises for every other function of a KeptWeight, naming it."""
        if func is not F.linear or isinstance(args[0], cls):
            return NotImplemented
        return args[1].linear(args[0], *args[2:], **(kwargs or {}))

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if not torch.is_grad_enabled() or not x.requires_grad:
            return linear(x, self.dequantized(), bias)
        y: Tensor = _Linear.apply(x, self)
        return y if bias is None else y + bias

    def unbind(self) -> list[KeptWeight]:
        """The weight of each expert."""
        parts = [None if part is None else part.unbind() for part in self.parts]
        return [
            replace(self, parts=tuple(None if part is None else part[index] for part in parts), shape=self.shape[1:])
            for index in range(self.shape[0])
        ]

    def dequantized(self) -> Tensor:
        """The weight as a plain tensor, without a gradient."""
        if self.ndim > 2:
            return torch.stack([one.dequantized() for one in self.unbind()])
        rows, columns = self.shape
        reader = _TensorReader({part.ending: t for (part, _, _), t in zip(self.form.parts(), self.parts, strict=True)})
        whole = (slice(0, rows), slice(0, columns))
        with torch.no_grad():
            if torch.compiler.is_compiling():
                return self.form.values(reader, (rows, columns), whole).to(self.dtype)
            out = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
            for region in regions(self.form, whole, CHUNK):
                out[region] = self.form.values(reader, (rows, columns), region)
        return out


class _Linear(torch.autograd.Function):
    """x weight^T; the weight is dequantized again for the gradient of x, in place of being saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: KeptWeight) -> Tensor:
        return linear(x, weight.dequantized())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.weight = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output @ ctx.weight.dequantized(), None

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, _: None) -> Tensor:
        return F.linear(x_tangent, ctx.weight.dequantized())


def dequantize(params: Tree) -> Tree:
    """`params` with plain tensors in the place of weights that `load_pretrained(keep_quantized=True)` kept.

    Args:
        params: a tree of dicts and lists; other leaves, adapters included, stay as they are.

    Returns:
        The tree, with each kept weight dequantized to its dtype.
    """
    if isinstance(params, KeptWeight):
        return params.dequantized()
    if isinstance(params, dict):
        return {name: dequantize(value) for name, value in params.items()}
    return [dequantize(value) for value in params] if isinstance(params, list) else params


@dataclass(frozen=True)
class _TensorReader:
    """The parts of a weight [rows, columns] in memory, by the ending of their names, see `form.Reader`."""

    parts: Mapping[str, Tensor | None]
    checks: bool = False

    def _part(self, part: Part) -> Tensor:
        tensor = self.parts[part.ending]
        assert tensor is not None
        return tensor.mT if part.inputs_first else tensor

    def has(self, part: Part) -> bool:
        return self.parts[part.ending] is not None

    def columns(self, part: Part) -> int:
        return self._part(part).shape[1]

    def read(self, part: Part, region: Region) -> Tensor:
        return self._part(part)[region]

    def refuse(self, part: Part, what: str) -> None:
        raise AssertionError(f"{part.ending}: {what}")


@dataclass(frozen=True)
class Target:
    """How a leaf is kept: the dtype that it is dequantized to (None: the method's), and its device."""

    dtype: torch.dtype | None
    device: torch.device


def keep(stored: Stored, shape: tuple[int, ...], found: Found, target: Target, buffer: Tensor) -> KeptWeight | None:
    """The leaf `stored` as the files have it; None where it is not quantized, or lies across their words or blocks.

    MismatchError for scales and groups that no quantizer writes.
    """
    singles = stored.tensors if isinstance(stored, Stack) else (stored,)
    each = [(single, found[disk_name(single)][1]) for single in singles]
    weights = [(single, weight) for single, weight in each if isinstance(weight, QuantizedWeight)]
    if len(weights) < len(singles) or len({weight.form for _, weight in weights}) > 1:
        return None
    read = [_read(single, weight, buffer) for single, weight in weights]
    kept = _stacked(read) if isinstance(stored, Stack) else read[0]
    if kept is None:
        return None
    weight = weights[0][1]
    moved = tuple(None if part is None else part.to(target.device) for part in kept)
    return KeptWeight(moved, weight.form, shape, target.dtype or weight.dtype)


Parts = tuple[Tensor | None, ...]


def _stacked(each: list[Parts | None]) -> Parts | None:
    """The parts of each weight as those of all of them; None where they differ."""
    parts = [one for one in each if one is not None]
    if len(parts) < len(each) or not all(_alike(parts[0], other) for other in parts):
        return None
    columns = ([tensor for tensor in column if tensor is not None] for column in zip(*parts, strict=True))
    return tuple(torch.stack(column) if column else None for column in columns)


def _alike(one: Parts, other: Parts) -> bool:
    """Whether the parts can be stacked."""
    return all(
        (a is None) == (b is None) and (a is None or b is None or (a.shape == b.shape and a.dtype == b.dtype))
        for a, b in zip(one, other, strict=True)
    )


def _read(single: Single, weight: QuantizedWeight, buffer: Tensor) -> Parts | None:
    """The parts of the rows that a leaf is of a weight, checked; None where they cannot be cut out."""
    fused = single if isinstance(single, TensorSlice) else None
    if (fused is not None and fused.transposed) != weight.form.turned or (fused and (fused.columns or fused.ones)):
        return None
    if len(weight.shape) > 2:
        inner = single if fused is None else replace(fused, batched=False)
        return _stacked([_read(inner, one, buffer) for one in matrices(weight)])
    total = weight.matrix_shape[0]
    cut = fused if fused is not None and (fused.start, fused.stop) != (0, total) else None
    reader = FileReader(weight, buffer)
    parts: list[Tensor | None] = []
    if cut is not None and weight.form.width:
        return None
    for part, row_axes, _ in weight.form.parts():
        if not reader.has(part):
            parts.append(None)
            continue
        tensor = reader.read(part, _everything(reader, part))
        if part.check and (fault := part.fault(part.decode(tensor))):
            reader.refuse(part, fault)
        rows = tensor if cut is None else _rows(tensor, row_axes, cut, total)
        if rows is None:
            return None
        parts.append((rows.mT if part.inputs_first else rows).contiguous())
    if weight.form.index is not None and reader.has(weight.form.index):
        weight.form.groups_of(reader, slice(0, weight.matrix_shape[1]))  # refuses those that do not exist
    return tuple(parts)


def _everything(reader: FileReader, part: Part) -> Region:
    if part.ending in reader.weight.numbers:
        return slice(0, 1), slice(0, 1)
    shape = reader.weight.parts[part.ending][1].shape
    rows, columns = shape[::-1] if part.inputs_first else shape
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

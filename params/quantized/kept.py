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

from fnmodels.ops.linear import linear
from fnmodels.tree import Tree, pytree, static
from params.sharding import Sharding, sharding_of

from .declared import Declaration
from .form import Form, Part, Region
from .weight import CHUNK, regions

NOT_LINEAR = ("kv_b_proj", "patch_proj")  # latent attention reads its rows apart, and it may be a convolution's


def may_stay(path: str, shape: tuple[int, ...]) -> bool:
    """Whether the leaf at `path` is applied by F.linear, or by a layer with experts."""
    name = path.rpartition(".")[2]
    if len(shape) == 2:
        return path.endswith(("_proj", "lm_head")) and name not in NOT_LINEAR
    return len(shape) == 3 and ".experts." in path and path.endswith("_proj")


@dataclass(frozen=True)
class Origin:
    """The form of a kept weight in its file, so that it can be written again.

    declaration: what says so. shapes: {name within the module: shape in the file} of the form's parts. beside: those of
    further tensors, which `KeptWeight.beside` holds. Names follow those of the modules: "weight_scale".
    """

    declaration: Declaration
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    beside: tuple[str, ...]


@pytree
@dataclass(frozen=True, eq=False)
class KeptWeight:
    """A weight [out, in], or those of experts [E, out, in], in the storage form of its file.

    parts: in the order of the form's, None for those that the file does not have; with experts [E, ...]. beside: of
    each tensor of codes in the files, those that say nothing of its values. full_shape: of the weight whose parts, or
    shards of parts, these are. dtype: of the dequantized weight. origin: None over a mesh, where it is not written.
    """

    parts: tuple[Any, ...]
    beside: tuple[tuple[Any, ...], ...]
    form: Form = static()
    full_shape: tuple[int, ...] = static()
    dtype: torch.dtype = static()
    origin: Origin | None = static(default=None)
    invariant: ClassVar[bool] = True  # its products are those of fnmodels.ops.linear

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight, or of the shard over tensor or expert parallelism whose parts these are."""
        *experts, rows, columns = self.full_shape
        codes, (*count, height, width) = self.form.codes, self.parts[0].shape
        if self.form.is_flat:
            return (*count[: len(experts)], rows, columns)
        height, width = (width, height) if codes.inputs_first else (height, width)
        return (
            *count,
            rows * height // codes.rows.count(rows),
            columns * width // codes.columns.count(columns),
        )

    @property
    def sharding(self) -> Sharding | None:
        """The sharding of the weight over a mesh, by that of its codes; None in one process."""
        codes = self.parts[0]
        codes_sharding = codes if isinstance(codes, Sharding) else sharding_of(codes)
        if codes_sharding is None:
            return None
        last = self.ndim - 1
        turned = {last: last - 1, last - 1: last} if self.form.codes.inputs_first else {}
        dims = [None if dim is None else turned.get(dim, dim) for dim in codes_sharding.dims]
        whole = [
            None if dim is None or self.full_shape[dim] % count else dim
            for dim, (_, count) in zip(dims, codes_sharding.sizes, strict=True)
        ]
        return Sharding(tuple(whole), codes_sharding.sizes, self.full_shape, self.dtype.itemsize, codes_sharding.mesh)

    @property
    def ndim(self) -> int:
        return len(self.full_shape)

    @property
    def device(self) -> torch.device:
        return next(part.device for part in self.parts if part is not None)

    @property
    def nbytes(self) -> int:
        """The bytes of its parts."""
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
        experts, *shape = self.shape
        parts = [None if part is None else part.unbind() for part in self.parts]
        return [
            replace(
                self,
                parts=tuple(None if part is None else part[index] for part in parts),
                beside=(),
                full_shape=tuple(shape),
            )
            for index in range(experts)
        ]

    def __getitem__(self, rows: slice) -> KeptWeight:
        """Some rows of a weight [out, in]. ValueError where its words or blocks hold others too."""
        parts: list[Tensor | None] = []
        for (part, axes, _), tensor in zip(self.form.parts(), self.parts, strict=True):
            if tensor is None or any(axis.elements == 0 for axis in axes):
                parts.append(tensor)
                continue
            extent = rows
            for axis in axes:
                if self.form.is_flat or extent.start % axis.elements or extent.stop % axis.elements:
                    raise ValueError(
                        f"Rows {rows.start} to {rows.stop} of a weight {list(self.shape)} kept as {self.form.name} lie "
                        "across its blocks or words: load it without keep_quantized."
                    )
                extent = axis.region(extent)
            parts.append(tensor[:, extent] if part.inputs_first else tensor[extent])
        shape = (rows.stop - rows.start, self.shape[1])
        return replace(self, parts=tuple(parts), beside=(), full_shape=shape)

    def reader(self) -> TensorReader:
        """A reader of its parts, those of one weight."""
        return TensorReader({part.ending: t for (part, _, _), t in zip(self.form.parts(), self.parts, strict=True)})

    def dequantized(self) -> Tensor:
        """The weight as a plain tensor, without a gradient."""
        if self.ndim > 2:
            return torch.stack([matrix.dequantized() for matrix in self.unbind()])
        rows, columns = self.shape
        reader, whole = self.reader(), (slice(0, rows), slice(0, columns))
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
    """Dequantizes weights that `load_pretrained(keep_quantized=True)` kept.

    Args:
        params: A tree of dicts and lists; other leaves, adapters included, stay as they are.

    Returns:
        The tree, with each kept weight dequantized to its dtype.
    """
    if isinstance(params, KeptWeight):
        return params.dequantized()
    if isinstance(params, dict):
        return {name: dequantize(value) for name, value in params.items()}
    return [dequantize(value) for value in params] if isinstance(params, list) else params


@dataclass(frozen=True)
class TensorReader:
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

"""Linear layers in float8: the projections of a model's layers multiply in 8 bits, by a wrapper of its blocks.

    loss = functools.partial(train.next_token_loss, config=config, layer_fn=train.float8_layers)

The recipe (arXiv 2209.05433): inputs and weights are cast to e4m3 and gradients to e5m2, each with one scale that is
the power of two which brings its largest value just below the format's, computed anew in every call. Products sum in
fp32 and return in the dtype of the input. Parameters, gradients, embedding, head, norms, attention, routers and
experts are as they were.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fnmodels.ops.torch_internals import scaled_product
from fnmodels.options import Block
from fnmodels.tree import Tree

_SIDE = 16  # the hardware's products take sides that are multiples of it


def float8_layers(block: Block) -> Block:
    """Multiplies the projections of a model's layers in float8 (arXiv 2209.05433): a `layer_fn` of losses and of
    `forward`.

        loss = functools.partial(train.next_token_loss, config=config, layer_fn=train.float8_layers)

    It composes with remat and compile, and has first derivatives by autograd only.

    Args:
        block: The block of a layer.

    Returns:
        The block, which casts weights [out, in] named ..._proj and their inputs to float8 where both sides divide by
        16.
    """

    def run(layer: Tree, *args: Any, **more: Any) -> Any:
        return block(in_float8(layer), *args, **more)

    return run


def in_float8(layer: Tree) -> Tree:
    """The layer's parameters with every weight [out, in] named ..._proj as a `Float8`, if both sides divide by 16.

    NotImplementedError for a weight that is no plain tensor, such as one with an adapter.
    """
    return _converted(layer, "")


def _converted(node: Tree, path: str) -> Tree:
    if isinstance(node, dict):
        return {key: _converted(value, f"{path}.{key}" if path else key) for key, value in node.items()}
    if isinstance(node, list):
        return [_converted(value, f"{path}.{i}") for i, value in enumerate(node)]
    if not path.endswith("_proj") or "experts" in path.split("."):
        return node
    if type(node) not in (Tensor, torch.nn.Parameter):
        raise NotImplementedError(
            f"{path} is a {type(node).__name__}, and float8_layers multiplies plain weights: without adapters, packed "
            "or quantized forms, and tensor parallelism."
        )
    return node if node.ndim != 2 or any(side % _SIDE for side in node.shape) else Float8(node)


@dataclass(frozen=True, eq=False)
class Float8:
    """A weight [out, in] that F.linear applies in float8; torch raises for every other function of it."""

    weight: Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not F.linear or isinstance(args[0], cls):
            return NotImplemented
        return _linear(args[0], args[1].weight, *args[2:], **(kwargs or {}))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.flatten(0, -2)
    count = rows.shape[0]
    rows = F.pad(rows, (0, 0, 0, -count % _SIDE)) if count % _SIDE else rows
    with torch.no_grad():
        casts = (*cast(rows, torch.float8_e4m3fn), *cast(weight, torch.float8_e4m3fn))
    function = _ProductTraced if torch.compiler.is_compiling() else _Product
    y: Tensor = function.apply(rows, weight, *casts)
    y = y[:count].view(*x.shape[:-1], weight.shape[0])
    return y if bias is None else y + bias


class _ProductTraced(torch.autograd.Function):
    """x [rows, in] weight^T of their casts. The gradients are products of the casts too. Dynamo traces no jvp rule."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, x8: Tensor, x_scale: Tensor, weight8: Tensor, weight_scale: Tensor
    ) -> Tensor:
        return product((x8, x_scale), (weight8, weight_scale), x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, *casts = inputs
        ctx.save_for_backward(*casts)
        ctx.dtypes = x.dtype, weight.dtype

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x, x_scale, weight, weight_scale = ctx.saved_tensors
        grad, scale = cast(grad_output, torch.float8_e5m2)
        to_x, to_weight = ctx.dtypes
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        return (
            product((grad, scale), (_transposed(weight), weight_scale), to_x) if needs_x else None,
            product((_transposed(grad), scale), (_transposed(x), x_scale), to_weight) if needs_weight else None,
            *[None] * 4,
        )


class _Product(_ProductTraced):
    """The same in eager mode, with a sentence for each transform that it has no rule for."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        _refuse("vmap")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse("forward mode")


def _refuse(transform: str) -> NoReturn:
    raise NotImplementedError(f"float8_layers has first derivatives by autograd alone, not {transform}: leave it out.")


def cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x / scale in float8, scale): scale is the least power of two with which every value fits; fp32, 0-d."""
    scale = scale_of(x.detach().abs().amax().float(), dtype)
    return (x / scale).to(dtype), scale


def scale_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The least power of two by which `largest`, fp32, must be divided to fit in the float8 `dtype`; 1 for 0."""
    exponent = torch.log2(largest / torch.finfo(dtype).max).ceil()
    return torch.exp2(torch.where(largest > 0, exponent, 0).clamp(-126, 127))


def product(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """left [M, K] right^T [K, N] of two results of `cast`, summed in fp32 and rounded to `dtype`."""
    (x, x_scale), (weight, weight_scale) = left, right
    return scaled_product(x, weight.t(), (x_scale, weight_scale), dtype)


def _transposed(x: Tensor) -> Tensor:
    return x.t().contiguous()

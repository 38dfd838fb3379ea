"""RMSNorm and LayerNorm of large tensors in fewer passes over memory than torch's several operations take on a CPU.

Row: GPT-2 step.
"""

from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.values import batched_gradient
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.torch_internals import is_plain_eager

from .blocks import Space, blocks, like

_MIN_ELEMENTS = 1 << 18  # elements; below it the overhead of Python dominates


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / rms(x), [..., 1]."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def takes_large_norm(x: Tensor, weight: Tensor) -> bool:
    """Whether `large_rms_norm` and `large_layer_norm` are for this tensor, in eager mode. Small ones take one check."""
    return (
        x.numel() >= _MIN_ELEMENTS
        and x.dtype in (torch.float32, torch.bfloat16)
        and weight.dtype in (x.dtype, torch.float32)
        and x.ndim > 1
        and weight.shape == x.shape[-1:]
        and is_plain_eager(x, weight)
    )


def large_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x), rounded to the weight's dtype, times the weight, in x's dtype."""
    normed: Tensor = _RMSNorm.apply(x, weight, eps)[0]
    return normed


def large_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias, in x's dtype; weight and bias in fp32."""
    normed: Tensor = _LayerNorm.apply(x, weight, bias, eps)[0]
    return normed


class _RMSNorm(torch.autograd.Function):
    """RMSNorm with half the passes over memory, and half the time, of torch's several operations on a CPU.

    x is normalized in fp32, rounded to the weight's dtype, multiplied by the weight, and cast back. It saves x and
    s = 1 / rms(x), nothing in fp32 of a narrower x. With p = grad_output * x and n elements in a row, grad_weight is
    the sum of s p over the rows, and grad_x = s grad_output weight - (s^3 / n) (p . weight) x, in fp32.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed, scale = like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
        space = Space(scale)
        for into, s, rows in blocks(normed, scale, x):
            wide = rows if rows.dtype is s.dtype else space("wide", *rows.shape).copy_(rows)
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True, out=s).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            if wide is rows:
                torch.mul(wide, s, out=into).mul_(weight)
            elif weight.dtype is x.dtype:
                into.copy_(wide.mul_(s)).mul_(weight)
            else:
                into.copy_(wide.mul_(s).mul_(weight))
        return normed, scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, ctx.eps = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])
        ctx.save_for_forward(x, weight, output[1])

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, weight_tangent: Tensor, _: None) -> tuple[Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide, x_tangent = upcast(x), upcast(x_tangent)
        scale_tangent = scale.pow(3) * (wide * x_tangent).mean(-1, keepdim=True)
        tangent = (x_tangent * scale - wide * scale_tangent) * weight + wide * scale * weight_tangent
        return tangent.to(x.dtype), None

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        if not torch.is_grad_enabled() and is_plain_eager(grad_output, x):
            return *_rms_norm_backward(grad_output, x, weight, scale), None
        wide, grad, factors = upcast(x), upcast(grad_output), upcast(weight)
        if torch.is_grad_enabled():  # double backward: recompute the scale as part of the graph
            scale = inverse_rms(wide, ctx.eps)
        products = grad * wide
        along = (products @ factors)[..., None]
        grad_weight = scale.reshape(-1) @ products.reshape(-1, x.shape[-1])
        grad_x = torch.addcmul(wide * (along * scale.pow(3) / -x.shape[-1]), grad * factors, scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def _rms_norm_backward(grad_output: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`_RMSNorm.backward` by blocks of rows, in memory that stays in the cache."""
    grad_x, space, factors = like(x), Space(scale), upcast(weight)
    grad_weight, cubes = factors.new_zeros(1, len(factors)), scale.pow(3).div_(-x.shape[-1])
    for into, *pieces, s, cube in blocks(grad_x, grad_output, x, scale, cubes):
        grad, wide = (
            t if t.dtype is s.dtype else space(name, *t.shape).copy_(t)
            for t, name in zip(pieces, ("grad", "wide"), strict=True)
        )
        products = torch.mul(grad, wide, out=space("products", *wide.shape))
        along = (products @ factors)[:, None].mul_(cube)
        grad_weight.addmm_(s.mT, products)
        grad_piece = torch.mul(grad, factors, out=products).mul_(s)
        if wide.dtype is into.dtype:
            torch.addcmul(grad_piece, wide, along, out=into)
        else:
            into.copy_(grad_piece.addcmul_(wide, along))
    return grad_x, grad_weight[0].to(weight.dtype)


class _LayerNorm(torch.autograd.Function):
    """torch's layer norm, one pass over memory in each direction, with derivatives of its derivatives.

    x may be bf16; weight and bias are fp32, so that torch keeps mean and scale in fp32 too. torch's own node is not
    used: in torch 2.13 reverse over forward mode through it silently gives wrong values.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_layer_norm(x, weight.shape, weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, ctx.eps = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, weight, bias, *output[1:])
        ctx.save_for_forward(x, weight)

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, weight_tangent: Tensor, bias_tangent: Tensor, _: None) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        unit, scale = _unit(upcast(x), ctx.eps)
        x_tangent = upcast(x_tangent)
        moved = x_tangent - x_tangent.mean(-1, keepdim=True)
        moved = scale * (moved - unit * (moved * unit).mean(-1, keepdim=True))
        return (moved * weight + unit * weight_tangent + bias_tangent).to(x.dtype), None, None

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        if torch.is_grad_enabled() or batched_gradient(grad_output):
            return *_layer_norm_backward(grad_output, x, weight, ctx.eps), None
        # In fp32, for torch adds up the gradients of weight and bias in bf16 (3% off over 1,024 rows).
        arguments = upcast(grad_output.contiguous()), upcast(x), weight.shape, mean, scale, weight, bias
        grad_x, *rest = torch.ops.aten.native_layer_norm_backward(*arguments, list(ctx.needs_input_grad[:3]))
        return None if grad_x is None else grad_x.to(x.dtype), *rest, None


def _layer_norm_backward(grad_output: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias in differentiable operations."""
    unit, scale = _unit(upcast(x), eps)
    rows, wide = tuple(range(x.ndim - 1)), upcast(grad_output)
    inner = wide * weight
    inner = inner - inner.mean(-1, keepdim=True) - unit * (inner * unit).mean(-1, keepdim=True)
    return (inner * scale).to(x.dtype), (wide * unit).sum(rows), wide.sum(rows)


def _unit(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x minus its mean, times the scale; the scale [..., 1]) of a layer norm."""
    centered = x - x.mean(-1, keepdim=True)
    scale = inverse_rms(centered, eps)
    return centered * scale, scale

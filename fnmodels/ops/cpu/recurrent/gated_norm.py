"""Gated norms of `ops.recurrent.gated_norm` by blocks of rows, whose intermediate results stay in the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from fnmodels.inputs.values import batched_gradient
from fnmodels.ops.autograd_guard import refuse
from fnmodels.ops.cpu.blocks import blocks, like
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.torch_internals import alone

Gated = Callable[[Tensor, Tensor], Tensor]
Definition = Callable[..., Tensor]  # (x, gate, *, weight, eps, silu) -> the gated norm

_ELEMENTS = 1 << 17  # of a block of rows


def fits_blocks(x: Tensor, gate: Tensor, weight: Tensor) -> bool:
    """Whether these are plain tensors of more than one block, in eager mode."""
    return x.numel() > _ELEMENTS >= x.shape[-1] and x.shape == gate.shape and alone(x, gate, weight)


def norm_then_gate(definition: Definition, x: Tensor, gate: Tensor, weight: Tensor, eps: float, silu: bool) -> Tensor:
    """The norm times silu(gate) or sigmoid(gate), with its gradient by blocks. definition: in torch's operations."""
    y: Tensor = _NormThenGate.apply(x, gate, weight, eps, silu, definition)
    return y


class _NormThenGate(torch.autograd.Function):
    """`norm_then_gate`; it saves its arguments only."""

    @staticmethod
    def forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float, silu: bool, definition: Definition) -> Tensor:
        return gated_by_blocks(
            functools.partial(definition, weight=weight, eps=eps, silu=silu), x, gate, overwrite=False
        )

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *saved, ctx.eps, ctx.silu, ctx.definition = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        if (again := torch.is_grad_enabled()) or batched_gradient(grad_y):  # a second derivative, or several first ones
            with torch.enable_grad():
                y = ctx.definition(x, gate, weight=weight, eps=ctx.eps, silu=ctx.silu).to(x.dtype)
            wanted = [t for t, need in zip((x, gate, weight), ctx.needs_input_grad, strict=False) if need]
            found = iter(torch.autograd.grad(y, wanted, grad_y, create_graph=again))
            return *(next(found) if need else None for need in ctx.needs_input_grad[:3]), None, None, None
        grad_x, grad_gate, wide = like(x), like(gate), upcast(weight)
        grad_weight = torch.zeros_like(wide)
        for into_x, into_gate, *given in blocks(grad_x, grad_gate, grad_y, x, gate, elements=_ELEMENTS):
            of_y, rows, gates = map(upcast, given)
            of_x, of_gate, of_weight = _gradient(of_y, rows, gates, wide, ctx.eps, ctx.silu)
            into_x.copy_(of_x)
            into_gate.copy_(of_gate)
            grad_weight += of_weight
        return grad_x, grad_gate, grad_weight.to(weight.dtype), None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse("auto")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        refuse("auto")


def _gradient(
    grad_y: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, gate [rows, D] and weight [D]: y = u w a with u = x s, s = 1 / rms(x), a = activation."""
    s = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    unit, sigmoid = x * s, gate.sigmoid()
    activation = gate * sigmoid if silu else sigmoid
    derivative = sigmoid * (1 - sigmoid)
    derivative = derivative.mul_(gate).add_(sigmoid) if silu else derivative
    by_gate = (unit * weight).mul_(grad_y).mul_(derivative)
    by_normed = grad_y * activation
    by_weight = (by_normed * unit).sum(0)
    by_unit = by_normed.mul_(weight)
    mean = (by_unit * unit).mean(-1, keepdim=True)
    return by_unit.addcmul_(unit, mean, value=-1).mul_(s), by_gate, by_weight


def gated_by_blocks(gated: Gated, x: Tensor, gate: Tensor, overwrite: bool) -> Tensor:
    """gated(x, gate) in x's dtype, a block of rows at a time, into a new tensor, or into x if that has no gaps."""
    y = x if overwrite and x.is_contiguous() else like(x)
    for into, *given in blocks(y, x, gate, elements=_ELEMENTS):
        into.copy_(gated(*given))
    return y

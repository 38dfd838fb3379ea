"""RMSNorms with a gate, which follow a recurrence; they differ in the order of norm and gate, and in rounding.

overwrite: the caller does not read x again, so that the result may be written into it where no gradient is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.values import batched_gradient
from fnmodels.ops.autograd_guard import refuse
from fnmodels.ops.cpu.blocks import blocks, like
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise, rows_are_invariant
from fnmodels.ops.norm import rms_norm, rms_norm_fp32_weight
from fnmodels.ops.norm_taps import is_watched
from fnmodels.ops.torch_internals import alone

Gated = Callable[[Tensor, Tensor], Tensor]

_ELEMENTS = 1 << 17  # of a block of rows, whose intermediate results stay in the cache


def norm_then_silu(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, overwrite: bool = False) -> Tensor:
    """rms_norm(x) * silu(gate), the product in fp32 (Gated DeltaNet). x, gate: [..., D]; weight: [D]."""
    return _norm_then_gate(x, gate, weight, eps, True, overwrite)


def norm_then_sigmoid(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, overwrite: bool = False) -> Tensor:
    """rms_norm(x) * sigmoid(gate), all in fp32 (Kimi Delta Attention). x, gate: [..., D]; weight: [D]."""
    return _norm_then_gate(x, gate, weight, eps, False, overwrite)


def silu_then_group_norm(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, groups: int = 1, overwrite: bool = False
) -> Tensor:
    """rms_norm over each of `groups` of x * silu(gate), times weight, all in fp32 (Mamba 2); in x's dtype.

    x, gate: [..., D]; weight: [D].
    """

    def gated(x: Tensor, gate: Tensor) -> Tensor:
        return _group_norm(upcast(x) * elementwise(F.silu, upcast(gate)), weight, eps, groups)

    return _without_gradients(gated, x, gate, weight, overwrite)


def group_norm_then_silu(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, groups: int = 1, overwrite: bool = False
) -> Tensor:
    """rms_norm over each of `groups` of x, times weight, times silu(gate), all in fp32 (Falcon-H1); in x's dtype.

    x, gate: [..., D]; weight: [D].
    """

    def gated(x: Tensor, gate: Tensor) -> Tensor:
        return _group_norm(upcast(x), weight, eps, groups) * elementwise(F.silu, upcast(gate))

    return _without_gradients(gated, x, gate, weight, overwrite)


def _group_norm(x: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    if groups == 1:
        return rms_norm_fp32_weight(x, weight, eps=eps)
    return rms_norm(x.unflatten(-1, (groups, -1)), None, eps=eps).flatten(-2) * upcast(weight)


def _norm_then_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float, silu: bool, overwrite: bool) -> Tensor:
    if torch.is_grad_enabled() and _fits_blocks(x, gate, weight):
        y: Tensor = _NormThenGate.apply(x, gate, weight, eps, silu)
        return y
    gated = functools.partial(_gated, weight=weight, eps=eps, silu=silu)
    return _without_gradients(gated, x, gate, weight, overwrite)


def _without_gradients(gated: Gated, x: Tensor, gate: Tensor, weight: Tensor, overwrite: bool) -> Tensor:
    """gated(x, gate) in x's dtype, by blocks of rows where that is possible and no gradient is needed."""
    by_blocks = not torch.is_grad_enabled() and _fits_blocks(x, gate, weight)
    return _by_blocks(gated, x, gate, overwrite) if by_blocks else gated(x, gate).to(x.dtype)


def _fits_blocks(x: Tensor, gate: Tensor, weight: Tensor) -> bool:
    """Whether these are plain tensors of more than one block, and nothing reads or edits the norm's output."""
    return (
        not torch.compiler.is_compiling()  # exported graphs have sizes that must not be compared
        and x.numel() > _ELEMENTS >= x.shape[-1]
        and x.shape == gate.shape
        and not rows_are_invariant()
        and not is_watched(weight)
        and alone(x, gate, weight)
    )


def _gated(x: Tensor, gate: Tensor, *, weight: Tensor, eps: float, silu: bool) -> Tensor:
    """The definition; in fp32 or x's dtype."""
    if silu:
        return rms_norm(x, weight, eps=eps) * elementwise(F.silu, upcast(gate))
    return rms_norm_fp32_weight(upcast(x), weight, eps=eps) * elementwise(torch.sigmoid, upcast(gate))


class _NormThenGate(torch.autograd.Function):
    """`_gated` and its gradient by blocks of rows, which stay in the cache; it saves its arguments only."""

    @staticmethod
    def forward(x: Tensor, gate: Tensor, weight: Tensor, eps: float, silu: bool) -> Tensor:
        return _by_blocks(functools.partial(_gated, weight=weight, eps=eps, silu=silu), x, gate, overwrite=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *saved, ctx.eps, ctx.silu = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        if (again := torch.is_grad_enabled()) or batched_gradient(grad_y):  # a second derivative, or several first ones
            with torch.enable_grad():
                y = _gated(x, gate, weight=weight, eps=ctx.eps, silu=ctx.silu).to(x.dtype)
            wanted = [t for t, need in zip((x, gate, weight), ctx.needs_input_grad, strict=False) if need]
            found = iter(torch.autograd.grad(y, wanted, grad_y, create_graph=again))
            return *(next(found) if need else None for need in ctx.needs_input_grad[:3]), None, None
        grad_x, grad_gate, wide = like(x), like(gate), upcast(weight)
        grad_weight = torch.zeros_like(wide)
        for into_x, into_gate, *given in blocks(grad_x, grad_gate, grad_y, x, gate, elements=_ELEMENTS):
            of_y, rows, gates = map(upcast, given)
            of_x, of_gate, of_weight = _gradient(of_y, rows, gates, wide, ctx.eps, ctx.silu)
            into_x.copy_(of_x)
            into_gate.copy_(of_gate)
            grad_weight += of_weight
        return grad_x, grad_gate, grad_weight.to(weight.dtype), None, None

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


def _by_blocks(gated: Gated, x: Tensor, gate: Tensor, overwrite: bool) -> Tensor:
    """gated(x, gate) in x's dtype, a block of rows at a time, into a new tensor, or into x if that has no gaps."""
    y = x if overwrite and x.is_contiguous() else like(x)
    for into, *given in blocks(y, x, gate, elements=_ELEMENTS):
        into.copy_(gated(*given))
    return y

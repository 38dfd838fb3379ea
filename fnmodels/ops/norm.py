"""Normalization layers: RMSNorm variants, which differ in where the weight multiplies, and LayerNorm.

All compute in promote(dtype, fp32): bf16 is upcast, fp64 stays fp64. The RMSNorm variants differ only in rounding.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from fnmodels.inputs.values import batched_gradient
from fnmodels.options import Tap

from .cpu.blocks import Space, blocks, like
from .dtypes import upcast
from .invariant.rows import rows_are_invariant
from .torch_internals import alone

_WATCHED: ContextVar[tuple[dict[int, str], Tap] | None] = ContextVar("fnmodels_watched_norms", default=None)
_MIN_ELEMENTS = 1 << 18  # below it the overhead of Python dominates


def _fused(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """F.rms_norm over the last dimension; `_RMSNorm` for large tensors on a CPU, and written out under
    `torch.func.linearize`.

    Torch 2.13 decomposes F.rms_norm there, folds what does not depend on the tangents into constants, and adds eps to
    a constant in place in every call of the linearized function, so that the second call would be silently wrong.
    """
    if weight is not None and _use_function(x, weight):
        return _large(x, weight, eps)
    if torch.compiler.is_compiling() or get_proxy_mode() is None:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    normed = x * _scale(x, eps)
    return normed if weight is None else normed * weight


def _scale(x: Tensor, eps: float) -> Tensor:
    """1 / rms(x), [..., 1]."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _use_function(x: Tensor, weight: Tensor) -> bool:
    if torch.compiler.is_compiling():  # exported graphs have sizes that must not be compared
        return False
    known = x.dtype in (torch.float32, torch.bfloat16) and weight.dtype in (x.dtype, torch.float32)
    large = known and x.ndim > 1 and x.numel() >= _MIN_ELEMENTS and weight.shape == x.shape[-1:]
    return large and alone(x, weight) and not rows_are_invariant()


def _large(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed: Tensor = _RMSNorm.apply(x, weight, eps)[0]
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
        if not torch.is_grad_enabled() and alone(grad_output, x):
            return *_rms_norm_backward(grad_output, x, weight, scale), None
        wide, grad, factors = upcast(x), upcast(grad_output), upcast(weight)
        if torch.is_grad_enabled():  # double backward: recompute the scale as part of the graph
            scale = _scale(wide, ctx.eps)
        products = grad * wide
        along = (products @ factors)[..., None]
        grad_weight = scale.reshape(-1) @ products.reshape(-1, x.shape[-1])
        grad_x = torch.addcmul(wide * (along * scale.pow(3) / -x.shape[-1]), grad * factors, scale)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def _rms_norm_backward(grad_output: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`_RMSNorm.backward` by blocks of rows, in memory that stays in the cache."""
    grad_x, space, factors = like(x), Space(scale), upcast(weight)
    grad_weight, cubes = factors.new_zeros(1, len(factors)), scale.pow(3).div_(-x.shape[-1])
    for into, *given, s, cube in blocks(grad_x, grad_output, x, scale, cubes):
        grad, wide = (
            t if t.dtype is s.dtype else space(name, *t.shape).copy_(t)
            for t, name in zip(given, ("grad", "wide"), strict=True)
        )
        products = torch.mul(grad, wide, out=space("products", *wide.shape))
        along = (products @ factors)[:, None].mul_(cube)
        grad_weight.addmm_(s.mT, products)
        found = torch.mul(grad, factors, out=products).mul_(s)
        if wide.dtype is into.dtype:
            torch.addcmul(found, wide, along, out=into)
        else:
            into.copy_(found.addcmul_(wide, along))
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
        given = upcast(grad_output.contiguous()), upcast(x), weight.shape, mean, scale, weight, bias
        grad_x, *rest = torch.ops.aten.native_layer_norm_backward(*given, list(ctx.needs_input_grad[:3]))
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
    scale = _scale(centered, eps)
    return centered * scale, scale


@contextmanager
def watched_norms(weights: Mapping[str, Tensor], tap: Tap) -> Iterator[None]:
    """A scope in which the norms with these weights call `tap` with NAME, their output, and NAME.scale, fp32 [..., 1].

    The scale is what multiplies x (after its mean is subtracted, in a LayerNorm): 1 / rms. The scope is one call of a
    block or a head, which enters it itself, so that it holds in recomputation too. NotImplementedError inside
    torch.compile.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"The taps of norms ({', '.join(weights)}) are read and edited in eager mode: leave torch.compile out."
        )
    before = _WATCHED.set(({id(weight): name for name, weight in weights.items()}, tap))
    try:
        yield
    finally:
        _WATCHED.reset(before)


def is_watched(weight: Tensor) -> bool:
    """Whether the norm with this weight calls a tap (`watched_norms`)."""
    found = None if torch.compiler.is_compiling() else _WATCHED.get()
    return found is not None and id(weight) in found[0]


def _watched(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tap, str] | None:
    """(x times its scale in fp32 at least, tap, name) of a norm that is watched; None of others."""
    found = None if torch.compiler.is_compiling() else _WATCHED.get()
    if found is None or id(weight) not in found[0]:
        return None
    name, tap = found[0][id(weight)], found[1]
    wide = upcast(x)
    return wide * tap(f"{name}.scale", _scale(wide, eps)), tap, name


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, cast back, then times `weight`, whose dtype is x's (arXiv 1910.07467; Llama).

    x [..., D]; weight [D], or None to apply none.
    """
    if weight is not None and (found := _watched(x, weight, eps)):
        return found[1](found[2], found[0].to(x.dtype) * weight)
    if weight is not None and weight.dtype is x.dtype and _use_function(x, weight):
        return _large(x, weight, eps)
    if x.dtype is torch.float32 or x.dtype is torch.float64:
        return _fused(x, weight, eps)  # without a cast in between, the fused form is the same maths
    normed = _fused(upcast(x), None, eps).to(x.dtype)
    return normed if weight is None else normed * weight


def rms_norm_fp32_weight(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`rms_norm` with the weight multiplied in fp32, before the cast back (OLMo 2, gpt-oss)."""
    if found := _watched(x, weight, eps):
        return found[1](found[2], (found[0] * upcast(weight)).to(x.dtype))
    if _use_function(x, wide := upcast(weight)):
        return _large(x, wide, eps)
    return _fused(upcast(x), wide, eps).to(x.dtype)


def rms_norm_zero_centered(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight), all in fp32, then cast back (Gemma)."""
    if found := _watched(x, weight, eps):
        return found[1](found[2], (found[0] * (1 + upcast(weight))).to(x.dtype))
    return rms_norm_fp32_weight(x, 1 + upcast(weight), eps=eps)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, zero_centered: bool = False
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (arXiv 1607.06450); fp32 inside.

    zero_centered: multiplies by 1 + weight instead.
    """
    w, b = (None if p is None else upcast(p) for p in (weight, bias))
    w = 1 + w if zero_centered and w is not None else w
    watched = not torch.compiler.is_compiling() and _WATCHED.get() is not None
    if w is not None and b is not None and not watched and _use_function(x, w) and b.dtype is w.dtype and alone(b):
        one_pass: Tensor = _LayerNorm.apply(x, w, b, eps)[0]
        return one_pass
    wide = upcast(x)
    # Not F.layer_norm, see `_LayerNorm`.
    centered = wide - wide.mean(-1, keepdim=True)
    if (found := _watched(centered, weight, eps)) and w is not None:
        return found[1](found[2], (found[0] * w if b is None else found[0] * w + b).to(x.dtype))
    normed = _fused(centered, w, eps)
    return (normed if b is None else normed + b).to(x.dtype)

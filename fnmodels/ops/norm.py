"""Normalizations. The kinds differ in where the weight multiplies, which only low precision can tell apart.

All of them compute in promote(dtype, fp32): bf16 is upcast, fp64 stays fp64.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .torch_internals import alone

_LEAST = 1 << 18  # numbers: where the time is in the numbers, and not in Python


def upcast(x: Tensor) -> Tensor:
    """`x` in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _fused(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """F.rms_norm over the last dimension: as one Function where a large one trains on a CPU, and written out where
    operations are recorded by `torch.func.linearize`.

    Torch 2.13 decomposes it there, folds what does not depend on the tangents, and adds eps to that in place: in every
    call of the linearized function anew, so that the second one would be wrong without an error.
    """
    if weight is not None and _pays(x, weight):
        normed: Tensor = _RMSNorm.apply(x, weight, eps)[0]
        return normed
    if torch.compiler.is_compiling() or get_proxy_mode() is None:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    normed = x * _scale(x, eps)
    return normed if weight is None else normed * weight


def _scale(x: Tensor, eps: float) -> Tensor:
    """1 / rms(x), [..., 1]."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _pays(x: Tensor, weight: Tensor) -> bool:
    wide = x.dtype is weight.dtype is torch.float32
    return wide and alone(x, weight) and weight.shape == x.shape[-1:] and x.numel() >= _LEAST


class _RMSNorm(torch.autograd.Function):
    """F.rms_norm, which on a CPU is a row of operations, in half of their passes over memory and half of the time.

    It keeps x and s = 1 / rms(x). With p = slope x and n numbers in a row, d_weight is the sum of s p over the rows,
    and d_x = s slope weight - (s^3 / n) (p . weight) x.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        return (x * scale).mul_(weight), scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, ctx.eps = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, weight, output[1])
        ctx.save_for_forward(x, weight, output[1])

    @staticmethod
    def jvp(ctx: Any, of_x: Tensor, of_weight: Tensor, _: None) -> tuple[Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        of_scale = scale.pow(3) * (x * of_x).mean(-1, keepdim=True)
        return (of_x * scale - x * of_scale) * weight + x * scale * of_weight, None

    @staticmethod
    def backward(ctx: Any, slope: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():  # a derivative of this is wanted too
            scale = _scale(x, ctx.eps)
        products = slope * x
        along = (products @ weight)[..., None]
        of_weight = scale.reshape(-1) @ products.reshape(-1, x.shape[-1])
        of_x = torch.addcmul(x * (along * scale.pow(3) / -x.shape[-1]), slope * weight, scale)
        return of_x, of_weight, None


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, cast back, then times `weight` in x's dtype: Llama's (arXiv 1910.07467).

    x [..., D], weight [D] or None for the weightless form.
    """
    if x.dtype is torch.float32 or x.dtype is torch.float64:
        return _fused(x, weight, eps)  # no cast stands between, so the fused form is the same maths
    normed = _fused(upcast(x), None, eps).to(x.dtype)
    return normed if weight is None else normed * weight


def rms_norm_fp32_weight(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """As `rms_norm`, but the weight multiplies before the cast back (OLMo 2, gpt-oss)."""
    return _fused(upcast(x), upcast(weight), eps).to(x.dtype)


def rms_norm_zero_centered(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight), all in fp32, then cast back (Gemma)."""
    return rms_norm_fp32_weight(x, 1 + upcast(weight), eps=eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (arXiv 1607.06450); fp32 inside."""
    w, b = (None if p is None else upcast(p) for p in (weight, bias))
    # Not F.layer_norm: in torch 2.13 reverse over forward mode goes through it with wrong values and no error.
    wide = upcast(x)
    normed = _fused(wide - wide.mean(-1, keepdim=True), w, eps)
    return (normed if b is None else normed + b).to(x.dtype)

"""Normalizations. The kinds differ in where the weight multiplies, which only low precision can tell apart.

All of them compute in promote(dtype, fp32): bf16 is upcast, fp64 stays fp64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """`x` in at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, cast back, then times `weight` in x's dtype: Llama's (arXiv 1910.07467).

    x [..., D], weight [D] or None for the weightless form.
    """
    if x.dtype is torch.float32 or x.dtype is torch.float64:
        return F.rms_norm(x, x.shape[-1:], weight, eps)  # no cast stands between, so the fused form is the same maths
    normed = F.rms_norm(upcast(x), x.shape[-1:], None, eps).to(x.dtype)
    return normed if weight is None else normed * weight


def rms_norm_fp32_weight(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """As `rms_norm`, but the weight multiplies before the cast back (OLMo 2, gpt-oss)."""
    return F.rms_norm(upcast(x), x.shape[-1:], upcast(weight), eps).to(x.dtype)


def rms_norm_zero_centered(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight), all in fp32, then cast back (Gemma)."""
    return rms_norm_fp32_weight(x, 1 + upcast(weight), eps=eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (arXiv 1607.06450); fp32 inside."""
    w, b = (None if p is None else upcast(p) for p in (weight, bias))
    # Not F.layer_norm: in torch 2.13 reverse over forward mode goes through it with wrong values and no error.
    wide = upcast(x)
    normed = F.rms_norm(wide - wide.mean(-1, keepdim=True), x.shape[-1:], w, eps)
    return (normed if b is None else normed + b).to(x.dtype)

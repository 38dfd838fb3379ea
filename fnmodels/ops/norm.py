"""Normalization layers: RMSNorm variants, which differ in where the weight multiplies, and LayerNorm.

All compute in promote(dtype, fp32): bf16 is upcast, fp64 stays fp64. The RMSNorm variants differ only in rounding.
Large tensors on a CPU take `ops.cpu.norm`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu.norm import inverse_rms, large_layer_norm, large_rms_norm, takes_large_norm
from .dtypes import upcast
from .invariant.rows import INVARIANT
from .norm_taps import WATCHED, watched
from .torch_internals import is_plain_eager, traced, without_modes


def _fused(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """F.rms_norm over the last dimension, written out under `torch.func.linearize`.

    Torch 2.13 decomposes F.rms_norm there, folds what does not depend on the tangents into constants, and adds eps to
    a constant in place in every call of the linearized function, so that the second call would be silently wrong.
    """
    if not traced():
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    normed = x * inverse_rms(x, eps)
    return normed if weight is None else normed * weight


def _is_large(x: Tensor, weight: Tensor) -> bool:
    compiled = torch.compiler.is_compiling()  # exported graphs have sizes that must not be compared
    return not compiled and takes_large_norm(x, weight) and not INVARIANT.get()


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float) -> Tensor:
    """x / rms(x) over the last dimension, cast back, then times `weight`, whose dtype is x's (arXiv 1910.07467; Llama).

    x [..., D]; weight [D], or None to apply none.
    """
    if weight is not None and not torch.compiler.is_compiling():
        if WATCHED.get() is not None and (watch := watched(x, weight, eps)):
            return watch[1](watch[2], watch[0].to(x.dtype) * weight)
        if takes_large_norm(x, weight) and weight.dtype is x.dtype and not INVARIANT.get():
            return large_rms_norm(x, weight, eps)
        if x.dtype is torch.float32 and without_modes():  # `_fused` without its questions; tp shards F.rms_norm
            return F.rms_norm(x, x.shape[-1:], weight, eps)
    if x.dtype is torch.float32 or x.dtype is torch.float64:
        return _fused(x, weight, eps)  # without a cast in between, the fused form is the same maths
    normed = _fused(upcast(x), None, eps).to(x.dtype)
    return normed if weight is None else normed * weight


def rms_norm_fp32_weight(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`rms_norm` with the weight multiplied in fp32, before the cast back (OLMo 2, gpt-oss)."""
    if watch := watched(x, weight, eps):
        return watch[1](watch[2], (watch[0] * upcast(weight)).to(x.dtype))
    if _is_large(x, wide := upcast(weight)):
        return large_rms_norm(x, wide, eps)
    return _fused(upcast(x), wide, eps).to(x.dtype)


def rms_norm_zero_centered(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight), all in fp32, then cast back (Gemma)."""
    if watch := watched(x, weight, eps):
        return watch[1](watch[2], (watch[0] * (1 + upcast(weight))).to(x.dtype))
    return rms_norm_fp32_weight(x, 1 + upcast(weight), eps=eps)


def rms_norm_offset(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`rms_norm_zero_centered`, but 1 + weight is rounded to the weight's dtype before it multiplies (Muse Spark)."""
    offset = 1 + weight
    if watch := watched(x, weight, eps):
        return watch[1](watch[2], (watch[0] * upcast(offset)).to(x.dtype))
    return rms_norm_fp32_weight(x, offset, eps=eps)


def rms_norm_scaled_input(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """y / rms(y) over the last dimension, of y = x * (1 + weight), which has x's dtype (Muse Spark).

    A weight of equal entries changes nothing but what `eps` does.
    """
    scaled = (upcast(x) * upcast(1 + weight)).to(x.dtype)
    if watch := watched(scaled, weight, eps):
        return watch[1](watch[2], watch[0].to(x.dtype))
    return rms_norm(scaled, None, eps=eps)


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, zero_centered: bool = False
) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension (arXiv 1607.06450); fp32 inside.

    zero_centered: multiplies by 1 + weight instead.
    """
    w, b = (None if p is None else upcast(p) for p in (weight, bias))
    w = 1 + w if zero_centered and w is not None else w
    if (
        w is not None
        and b is not None
        and _is_large(x, w)
        and b.dtype is w.dtype
        and is_plain_eager(b)
        and WATCHED.get() is None
    ):
        return large_layer_norm(x, w, b, eps)
    wide = upcast(x)
    # Not F.layer_norm, see `ops.cpu.norm`.
    centered = wide - wide.mean(-1, keepdim=True)
    if (watch := watched(centered, weight, eps)) and w is not None:
        return watch[1](watch[2], (watch[0] * w if b is None else watch[0] * w + b).to(x.dtype))
    large = w is not None and _is_large(centered, w)
    normed = large_rms_norm(centered, w, eps) if large and w is not None else _fused(centered, w, eps)
    return (normed if b is None else normed + b).to(x.dtype)


def l2_clip(x: Tensor, threshold: float) -> Tensor:
    """x, scaled down over the last dimension where its L2 norm is above `threshold`; in fp32, then cast back."""
    wide = upcast(x)
    norm = wide.square().sum(-1, keepdim=True).clamp(min=1e-24).sqrt()  # whose derivative at 0 is 0
    return (wide * (threshold / (norm + 1e-6)).clamp(max=1)).to(x.dtype)

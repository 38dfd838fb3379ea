"""RMSNorms with a gate, which follow a recurrence; they differ in the order of norm and gate, and in rounding."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.invariant import elementwise, rows_are_invariant
from fnmodels.ops.norm import rms_norm, rms_norm_fp32_weight, upcast
from fnmodels.ops.torch_internals import alone

_ELEMENTS = 1 << 17  # of a block of rows, whose intermediate results stay in the cache


def norm_then_silu(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate), the product in fp32 (Gated DeltaNet). x, gate: [..., D]; weight: [D]."""
    return _by_blocks(x, gate, lambda x, gate: rms_norm(x, weight, eps=eps) * elementwise(F.silu, upcast(gate)))


def norm_then_sigmoid(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """rms_norm(x) * sigmoid(gate), all in fp32 (Kimi Delta Attention). x, gate: [..., D]; weight: [D]."""
    return _by_blocks(
        x,
        gate,
        lambda x, gate: rms_norm_fp32_weight(upcast(x), weight, eps=eps) * elementwise(torch.sigmoid, upcast(gate)),
    )


def silu_then_group_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, groups: int = 1) -> Tensor:
    """rms_norm over each of `groups` of x * silu(gate), times weight, all in fp32 (Mamba 2); in x's dtype.

    x, gate: [..., D]; weight: [D].
    """
    return _by_blocks(
        x, gate, lambda x, gate: _group_norm(upcast(x) * elementwise(F.silu, upcast(gate)), weight, eps, groups)
    )


def group_norm_then_silu(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, groups: int = 1) -> Tensor:
    """rms_norm over each of `groups` of x, times weight, times silu(gate), all in fp32 (Falcon-H1); in x's dtype.

    x, gate: [..., D]; weight: [D].
    """
    return _by_blocks(
        x, gate, lambda x, gate: _group_norm(upcast(x), weight, eps, groups) * elementwise(F.silu, upcast(gate))
    )


def _group_norm(x: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    if groups == 1:
        return rms_norm_fp32_weight(x, weight, eps=eps)
    return rms_norm(x.unflatten(-1, (groups, -1)), None, eps=eps).flatten(-2) * upcast(weight)


def _by_blocks(x: Tensor, gate: Tensor, gated: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """gated(x, gate) in x's dtype; without gradients a block of rows at a time, into one new tensor instead of four."""
    if torch.is_grad_enabled() or x.numel() <= _ELEMENTS or rows_are_invariant() or not alone(x, gate):
        return gated(x, gate).to(x.dtype)
    y, rows, gates = torch.empty_like(x), x.flatten(0, -2), gate.flatten(0, -2)
    for into, *given in zip(*(t.split(_ELEMENTS // x.shape[-1]) for t in (y.flatten(0, -2), rows, gates)), strict=True):
        into.copy_(gated(*given))
    return y

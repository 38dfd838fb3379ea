"""RMSNorms with a gate, which follow a recurrence; they differ in the order of norm and gate, and in rounding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise
from fnmodels.ops.norm import rms_norm, rms_norm_fp32_weight


def norm_then_silu(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """rms_norm(x) * silu(gate), the product in fp32 (Gated DeltaNet). x, gate: [..., D]; weight: [D]."""
    return (rms_norm(x, weight, eps=eps) * elementwise(F.silu, upcast(gate))).to(x.dtype)


def norm_then_sigmoid(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """rms_norm(x) * sigmoid(gate), all in fp32 (Kimi Delta Attention). x, gate: [..., D]; weight: [D]."""
    return (rms_norm_fp32_weight(upcast(x), weight, eps=eps) * elementwise(torch.sigmoid, upcast(gate))).to(x.dtype)


def silu_then_group_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, groups: int = 1) -> Tensor:
    """rms_norm over each of `groups` of x * silu(gate), times weight, all in fp32 (Mamba 2); in x's dtype.

    x, gate: [..., D]; weight: [D].
    """
    return _group_norm(upcast(x) * elementwise(F.silu, upcast(gate)), weight, eps, groups).to(x.dtype)


def group_norm_then_silu(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float, groups: int = 1) -> Tensor:
    """rms_norm over each of `groups` of x, times weight, times silu(gate), all in fp32 (Falcon-H1); in x's dtype.

    x, gate: [..., D]; weight: [D].
    """
    return (_group_norm(upcast(x), weight, eps, groups) * elementwise(F.silu, upcast(gate))).to(x.dtype)


def _group_norm(x: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    if groups == 1:
        return rms_norm_fp32_weight(x, weight, eps=eps)
    return rms_norm(x.unflatten(-1, (groups, -1)), None, eps=eps).flatten(-2) * upcast(weight)

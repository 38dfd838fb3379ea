"""RMSNorms with a gate, which follow a recurrence; they differ in the order of norm and gate, and in rounding.

overwrite: the caller does not read x again, so that the result may be written into it where no gradient is needed.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.cpu.recurrent.gated_norm import Gated, fits_blocks, gated_by_blocks, norm_then_gate
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise, rows_are_invariant
from fnmodels.ops.norm import rms_norm, rms_norm_fp32_weight
from fnmodels.ops.norm_taps import is_watched


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
        return norm_then_gate(_gated, x, gate, weight, eps, silu)
    gated = functools.partial(_gated, weight=weight, eps=eps, silu=silu)
    return _without_gradients(gated, x, gate, weight, overwrite)


def _without_gradients(gated: Gated, x: Tensor, gate: Tensor, weight: Tensor, overwrite: bool) -> Tensor:
    """gated(x, gate) in x's dtype, by blocks of rows where that is possible and no gradient is needed."""
    by_blocks = not torch.is_grad_enabled() and _fits_blocks(x, gate, weight)
    return gated_by_blocks(gated, x, gate, overwrite) if by_blocks else gated(x, gate).to(x.dtype)


def _fits_blocks(x: Tensor, gate: Tensor, weight: Tensor) -> bool:
    """Whether `ops.cpu.recurrent.gated_norm` may compute this, and nothing reads or edits the norm's output."""
    # exported graphs have sizes that must not be compared
    eager = not torch.compiler.is_compiling() and fits_blocks(x, gate, weight)
    return eager and not rows_are_invariant() and not is_watched(weight)


def _gated(x: Tensor, gate: Tensor, *, weight: Tensor, eps: float, silu: bool) -> Tensor:
    """The definition; in fp32 or x's dtype."""
    if silu:
        return rms_norm(x, weight, eps=eps) * elementwise(F.silu, upcast(gate))
    return rms_norm_fp32_weight(upcast(x), weight, eps=eps) * elementwise(torch.sigmoid, upcast(gate))

"""The choice of the implementation of a mixture's experts: by name, or by what a call has."""

from __future__ import annotations

import torch
from torch import Tensor

from fnmodels.inputs.values import host_is_away, readable
from fnmodels.options import Experts

from .experts import (
    compiled_experts,
    dense_experts,
    dense_stored_experts,
    few_experts,
    grouped_experts,
    invariant_experts,
    is_stored,
    loop_experts,
    misaligned,
    stored_experts,
)

_PATHS: dict[str, Experts] = {
    "loop": loop_experts,
    "grouped": grouped_experts,
    "dense": dense_experts,
    "invariant": invariant_experts,
}


def choose_experts(experts: str | Experts, x: Tensor, *weights: Tensor) -> Experts:
    """The implementation named `experts` (see `ops.moe.experts`, or "auto"), or `experts` itself if it is a function.

    "auto" is `compiled_experts` in compiled graphs, and "dense" if values of x or the weights cannot be read (vmap,
    meta); else "grouped" if dtype and widths allow it, and "loop" otherwise; `few_experts` on a CPU without gradients
    for one token, or one for every 16 experts; in CUDA graphs "grouped" where it is one kernel and "dense" otherwise.
    ValueError for an unknown name.
    """
    if not isinstance(experts, str):
        return experts
    if any(map(is_stored, weights)) and experts != "invariant":
        if experts == "dense" or not readable(x) or torch.compiler.is_compiling():
            return dense_stored_experts
        return stored_experts
    if experts == "auto":
        if torch.compiler.is_compiling():
            return compiled_experts
        if not all(map(readable, (x, *weights))):
            experts = "dense"
        elif host_is_away():
            experts = "grouped" if _fused(x) and not any(map(misaligned, weights)) else "dense"
        elif weights and x.is_cpu and not torch.is_grad_enabled() and _few(x.shape[:-1].numel(), len(weights[0])):
            return few_experts
        else:
            experts = "loop" if x.dtype is torch.float64 or any(map(misaligned, weights)) else "grouped"
    if experts not in _PATHS:
        raise ValueError(f"experts is {experts!r}; it must be auto, {', '.join(_PATHS)}, or a function.")
    return _PATHS[experts]


def _few(tokens: int, experts: int) -> bool:
    """Whether a loop in Python over the experts with tokens is faster than one over all in F.grouped_mm.

    Steps of benchmarks/moe.py's model (8 of 128 experts, fp32) take 5.6 and 8.4 ms for one token, 14.1 and 14.9 for 8,
    20.9 and 20.1 for 16.
    """
    return tokens <= max(1, experts // 16)


def _fused(x: Tensor) -> bool:
    """Whether F.grouped_mm is one kernel, and no loop over experts whose counts are read on the host."""
    if not x.is_cuda or x.dtype is not torch.bfloat16 or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(x.device)[0] in (9, 10)

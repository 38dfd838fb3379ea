"""kernel="varlen": torch's variable-length flash attention over documents one after another. CUDA, fp16 and bf16."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.convert import Ragged
from fnmodels.inputs.rules import And, BidirectionalWindow, Causal, Everything, Rule, Window


def varlen_window(rule: Rule) -> tuple[int, int] | None:
    """The keys (before, behind) that a query sees beside its own, -1 for all; None for rules that say more."""
    match rule:
        case Everything():
            return -1, -1
        case Causal():
            return -1, 0
        case Window(size):
            return size - 1, -1
        case BidirectionalWindow(size):
            return size, size
        case And(left, right):
            one, other = varlen_window(left), varlen_window(right)
            if one is None or other is None:
                return None
            return _narrower(one[0], other[0]), _narrower(one[1], other[1])
    return None


def _narrower(one: int, other: int) -> int:
    return other if one < 0 else one if other < 0 else min(one, other)


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, documents: Ragged, *, window: tuple[int, int], scale: float
) -> Tensor:
    """Shapes as in `ops.attention.select`; queries and keys are the same tokens."""
    if not documents.longest:  # The kernel wants one document at least. Sums over nothing: a backward brings 0.
        return q.new_zeros(*q.shape[:-1], v.shape[-1]) + sum(t[:0].sum() for t in (q, k, v))
    from torch.nn.attention.varlen import varlen_attn

    # The kernel takes one width, a multiple of 8: zeros behind add nothing to scores, and columns that are cut off.
    value_width, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
    width += -width % 8
    flat = [F.pad(t, (0, width - t.shape[-1])).flatten(0, 1) for t in (q, k, v)]
    if documents.tokens is not None:
        flat = [t.index_select(0, documents.tokens) for t in flat]
    # Older releases group queries without being told; the newer ones want to be told.
    told = q.shape[-2] != k.shape[-2] and "enable_gqa" in inspect.signature(varlen_attn).parameters
    offsets, longest = documents.offsets, documents.longest
    call: Any = functools.partial(varlen_attn, enable_gqa=True) if told else varlen_attn
    out = call(*flat, offsets, offsets, longest, longest, scale=scale, window_size=window)[..., :value_width]
    if documents.tokens is not None:
        out = out.new_zeros(q.shape[0] * q.shape[1], *out.shape[1:]).index_copy(0, documents.tokens, out)
    return out.unflatten(0, q.shape[:2])

"""kernel="varlen": torch's variable-length flash attention over documents one after another. CUDA, fp16 and bf16."""

from __future__ import annotations

from torch import Tensor

from ..convert import Packed
from ..rules import And, BidirectionalWindow, Causal, Everything, Rule, Window


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
            before, behind = (min((n for n in pair if n >= 0), default=-1) for pair in zip(one, other, strict=True))
            return before, behind
    return None


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, *, window: tuple[int, int], scale: float
) -> Tensor:
    """Shapes as in `ops.attention`; queries and keys are the same tokens."""
    from torch.nn.attention.varlen import varlen_attn

    flat = [t.flatten(0, 1) for t in (q, k, v)]
    if packed.tokens is not None:
        flat = [t.index_select(0, packed.tokens) for t in flat]
    offsets, longest = packed.offsets, packed.longest
    grouped = {"enable_gqa": True} if q.shape[-2] != k.shape[-2] else {}
    out = varlen_attn(*flat, offsets, offsets, longest, longest, scale=scale, window_size=window, **grouped)
    if packed.tokens is not None:
        out = out.new_zeros(q.shape[0] * q.shape[1], *out.shape[1:]).index_copy(0, packed.tokens, out)
    return out.unflatten(0, q.shape[:2])

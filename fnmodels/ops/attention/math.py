"""kernel="math": attention in plain operations, scores and probabilities in fp32 at least; supports every transform."""

import torch
from einops import rearrange
from torch import Tensor

from fnmodels.ops.norm import upcast
from fnmodels.options import Tap


def math_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tap: Tap | None = None,
) -> Tensor:
    """Shapes as in `ops.attention.select`; allowed: bool [B or 1, N or 1, Q, K].

    tap: called with "attention.scores" (scaled and soft-capped, before the mask, which thus holds for edited scores
    too) and "attention.pattern" (the weights of the values), both [B, N, Q, K] in fp32 at least.
    Masked keys have weight 0, and 0 times NaN is NaN: the caller must zero values that may not be finite.
    """
    groups, repeats = k.shape[-2], q.shape[-2] // k.shape[-2]
    if not k.shape[1]:  # amax refuses an empty dimension
        return v.new_zeros((*q.shape[:-1], v.shape[-1]))
    # Contiguous copies, not einsum, whose memory layout differs for a batch of one: a row's bits must not depend on B.
    q = rearrange(q, "b q (g r) h -> b g (r q) h", g=groups).contiguous()
    k, v = (rearrange(t, "b k g h -> b g k h").contiguous() for t in (k, v))
    scores = upcast(rearrange(q @ k.mT, "b g (r q) k -> b g r q k", r=repeats)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores if tap is None else _tapped(tap, "attention.scores", scores)
    per_head = allowed.shape[1] > 1
    allowed = rearrange(allowed, "b (g r) q k -> b g r q k", g=groups) if per_head else allowed[:, :, None]
    scores = scores.masked_fill(~allowed, -torch.inf)
    # Subtracting the maximum does not change the result, so it needs no gradient; without keys the maximum is -inf.
    top = scores.detach().amax(dim=-1, keepdim=True)
    if sinks is not None:
        sinks = rearrange(upcast(sinks), "(g r) -> g r 1 1", g=groups)
        top = torch.maximum(top, sinks.detach())
    top = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    weights = weights / total.masked_fill(total == 0, 1)
    weights = weights if tap is None else _tapped(tap, "attention.pattern", weights)
    out = rearrange(weights.to(v.dtype), "b g r q k -> b g (r q) k") @ v
    return rearrange(out, "b g (r q) h -> b q (g r) h", r=repeats)


def _tapped(tap: Tap, name: str, scores: Tensor) -> Tensor:
    """What `tap` makes of [B, G, N / G, Q, K], which it sees as [B, N, Q, K]."""
    return tap(name, scores.flatten(1, 2)).unflatten(1, scores.shape[1:3])

"""kernel="math": attention in plain operations, scores and probabilities in fp32 at least; supports every transform."""

import torch
from torch import Tensor

from fnmodels.ops.dtypes import upcast
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
    bias: Tensor | None = None,
    tap: Tap | None = None,
) -> Tensor:
    """Shapes as in `ops.attention.select`; allowed: bool [B or 1, N or 1, Q, K]; bias [B or 1, N, Q, K];
    sinks [N] or [B, Q, N].

    tap: called with "attention.scores" (scaled, soft-capped and with their bias, before the mask, which thus holds for
    edited scores too) and "attention.pattern" (the weights of the values), both [B, N, Q, K] in fp32 at least.
    Masked keys have weight 0, and 0 times NaN is NaN: the caller must zero values that may not be finite.
    """
    groups, repeats = k.shape[-2], q.shape[-2] // k.shape[-2]
    if not k.shape[1]:  # amax refuses an empty dimension
        return v.new_zeros((*q.shape[:-1], v.shape[-1]))
    # Contiguous copies, not einsum, whose memory layout differs for a batch of one: a row's bits must not depend on B.
    # The N query heads are G groups of R; a group's queries are the rows of one product: [B, G, R Q, H] @ [B, G, H, K].
    q = q.unflatten(2, (groups, repeats)).permute(0, 2, 3, 1, 4).flatten(2, 3).contiguous()
    k, v = (t.transpose(1, 2).contiguous() for t in (k, v))
    scores = upcast((q @ k.mT).unflatten(2, (repeats, -1)))  # [B, G, R, Q, K]
    # `*` makes a tensor of the number, and forward mode adds its zero tangent by way of Python: 5% of a small jvp.
    scores = torch.ops.aten.mul.Scalar(scores, scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + upcast(bias).unflatten(1, (groups, repeats))
    scores = scores if tap is None else _tapped(tap, "attention.scores", scores)
    per_head = allowed.shape[1] > 1
    allowed = allowed.unflatten(1, (groups, repeats)) if per_head else allowed[:, :, None]
    scores = scores.masked_fill(~allowed, -torch.inf)
    # Subtracting the maximum does not change the result, so it needs no gradient; without keys the maximum is -inf.
    top = scores.detach().amax(dim=-1, keepdim=True)
    if sinks is not None:
        by_token = upcast(sinks).mT if sinks.ndim == 3 else upcast(sinks)[:, None]  # [B, N, Q] or [N, 1]
        sinks = by_token.unflatten(-2, (groups, repeats))[..., None]
        top = torch.maximum(top, sinks.detach())
    top = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    weights = weights / total.masked_fill(total == 0, 1)
    weights = weights if tap is None else _tapped(tap, "attention.pattern", weights)
    out = weights.to(v.dtype).flatten(2, 3) @ v
    return out.unflatten(2, (repeats, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _tapped(tap: Tap, name: str, scores: Tensor) -> Tensor:
    """The result of `tap` for [B, G, N / G, Q, K], which it sees as [B, N, Q, K]."""
    return tap(name, scores.flatten(1, 2)).unflatten(1, scores.shape[1:3])

"""Scaled dot-product attention (arXiv 1706.03762) behind one function and several kernels.

q [B, Q, N, H], k [B, K, G, H], v [B, K, G, Hv] with N a multiple of G (grouped queries, arXiv 2305.13245).
The result is [B, Q, N, Hv]; a query that sees no key gives 0, and 0 gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from ..mask import Causal, Layout, Mask, MaskLike
from .norm import upcast

KERNELS = ("auto", "math", "sdpa")


def choose_kernel(mask: MaskLike, *, softcap: float | None = None, sinks: Tensor | None = None) -> tuple[str, str]:
    """What kernel="auto" uses, and why: (name, reason)."""
    if softcap is not None or sinks is not None:
        return "math", "scores are changed between the product and the softmax, which fused attention cannot do"
    return "sdpa", "fused, and no other kernel knows more about this mask"


def materialize(mask: MaskLike, kernel: str, layout: Layout | None) -> MaskLike:
    """The mask in the form the kernel reads, made once for all layers: dense unless the kernel can do without."""
    if kernel not in KERNELS:
        raise ValueError(f"The kernel {kernel!r} is unknown; known are {', '.join(KERNELS)}.")
    if not isinstance(mask, Mask) or is_plain_causal(mask, layout):
        return mask
    return mask.dense()


def is_plain_causal(mask: MaskLike, layout: Layout | None) -> bool:
    """Whether the triangle over indices is this mask."""
    return isinstance(mask, Mask) and layout is not None and layout.plain and mask.rule == Causal()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike,
    *,
    kernel: str = "auto",
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    layout: Layout | None = None,
) -> Tensor:
    """softmax(scale q k^T, masked) v.

    mask: `Mask`, or bool [B or 1, 1, Q, K] with True where a query may look. softcap c replaces scores s by c tanh(s / c)
    before the mask. sinks [N]: one more logit per head that takes probability and gives nothing. layout: see
    `fnmodels.layout`. Raises ValueError where the kernel cannot express what is asked, naming one that can.
    """
    if kernel == "auto":
        kernel, _ = choose_kernel(mask, softcap=softcap, sinks=sinks)
    if kernel == "math":
        allowed = mask.dense() if isinstance(mask, Mask) else mask
        return _math(q, k, v, allowed, scale, softcap, sinks)
    if kernel == "sdpa":
        if softcap is not None or sinks is not None:
            raise ValueError('The kernel "sdpa" has no softcap and no sinks; kernel="math" has both.')
        return _sdpa(q, k, v, mask, scale, layout)
    raise ValueError(f"The kernel {kernel!r} is unknown; known are {', '.join(KERNELS)}.")


def _math(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Written out, in at least fp32 from the scores to the probabilities: every transform works."""
    groups = k.shape[-2]
    if not k.shape[1]:  # amax refuses an empty dimension
        return v.new_zeros((*q.shape[:-1], v.shape[-1]))
    q = rearrange(q, "b q (g r) h -> b g r q h", g=groups)
    scores = upcast(torch.einsum("bgrqh,bkgh->bgrqk", q, k)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~allowed[:, :, None], -torch.inf)
    # Subtracting the maximum changes no value, so it needs no gradient; a row without keys has maximum -inf.
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
    out = torch.einsum("bgrqk,bkgh->bgrqh", weights.to(v.dtype), v)
    return rearrange(out, "b g r q h -> b q (g r) h")


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: MaskLike, scale: float, layout: Layout | None) -> Tensor:
    """Torch's fused attention: by causality alone where the layout says that this is the mask, else with a dense one."""
    plain = is_plain_causal(mask, layout)
    allowed = None if plain else mask.dense() if isinstance(mask, Mask) else mask
    try:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=allowed,
            is_causal=plain,
            scale=scale,
            enable_gqa=q.shape[-2] != k.shape[-2],
        )
    except NotImplementedError as error:  # forward-mode differentiation of a fused kernel
        raise NotImplementedError(
            'This transform does not go through kernel="sdpa"; kernel="math" supports all.'
        ) from error
    return out.transpose(1, 2)

"""kernel="sdpa": torch's fused scaled_dot_product_attention, with is_causal, no mask, or a dense mask."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Mask, MaskLike
from fnmodels.inputs.rules import Causal, Everything, Rule, simplify
from fnmodels.ops.autograd_guard import guarded
from fnmodels.ops.cpu.tiled_kernel import pad_to_equal_width
from fnmodels.ops.dtypes import upcast

from .math import math_attention

_BY_INDEX: tuple[Rule, ...] = (Causal(), Everything())


@tree.pytree
@dataclass(frozen=True)
class ByIndex:
    """The mask form of "sdpa" for rows of one full document: `Causal()` by index, or `Everything()`."""

    rule: Rule = tree.static()


def by_index(mask: MaskLike, layout: Layout | None) -> Rule | None:
    """`Causal()` if the mask equals is_causal over indices, `Everything()` if all keys are visible; else None."""
    if not isinstance(mask, Mask) or layout is None or not layout.plain:
        return None
    if type(mask.rule) is Causal and layout.length > 1:  # the usual case, in which nothing can be simplified
        return mask.rule
    rule: Rule | None = None
    for (first,) in set(layout.firsts):
        span = first, first + layout.length - 1
        of_rows = simplify(mask.rule, span, span)
        if rule is not None and of_rows != rule:
            return None
        rule = of_rows
    return rule if rule in _BY_INDEX else None


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    *,
    causal: bool = False,
    scale: float,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Shapes as in `ops.attention.select`. allowed: bool [B or 1, N or 1, Q, K] or None; causal: mask by index.

    bias [B or 1, N, Q, K]: added to the scores. sinks: [N], or [B, Q, N] beside a bias.
    """
    if bias is not None:
        return _biased(q, k, v, allowed, causal, scale, bias, sinks)
    if sinks is not None:
        q, k, v, allowed = _with_sink(q, k, v, allowed, causal, scale, sinks)
    width, grouped = v.shape[-1], _is_grouped(q, k)
    if q.shape[-1] != width:
        q, k, v = pad_to_equal_width(q, k, v)
    if grouped and not causal and q.is_cpu and q.shape[1] == 1 and (allowed is None or allowed.shape[1] == 1):
        out = _of_groups(q, k, v, allowed, scale)
    else:
        out = _fused(q, k, v, attn_mask=allowed, is_causal=causal, scale=scale, enable_gqa=grouped)
    if out.shape[-1] > width:
        out = out[..., :width]
    if allowed is not None and not q.is_cpu:  # CUDA in half precision gives the mean of values to a query without keys
        out = out.where(allowed.any(-1).transpose(1, 2)[..., None], 0)
    return out[:, 1:] if sinks is not None and causal else out


def _fused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """torch's fused attention of [B, S, heads, H], as [B, Q, N, Hv]."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return guarded("sdpa", F.scaled_dot_product_attention, q, k, v, **options).transpose(1, 2)


def _of_groups(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, scale: float) -> Tensor:
    """`_fused` of one query per head, with the heads of a group as its queries: keys are read once, which is 5 times as
    fast in bf16."""
    batch, _, heads, width = q.shape
    groups = k.shape[2]
    q, k, v = q.reshape(batch, groups, heads // groups, width), k.transpose(1, 2), v.transpose(1, 2)
    out = guarded("sdpa", F.scaled_dot_product_attention, q, k, v, attn_mask=allowed, scale=scale)
    return out.reshape(batch, 1, heads, v.shape[-1])


def _biased(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    allowed: Tensor | None,
    causal: bool,
    scale: float,
    bias: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    if causal or (allowed is None and sinks is not None):
        allowed = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)[None, None]
        allowed = allowed.tril() if causal else allowed
    if sinks is not None and allowed is not None:
        # written out: torch's fused kernel is another one, of other bits, where a bias has a gradient
        return math_attention(q, k, v, allowed, scale=scale, sinks=sinks, bias=bias)
    bias = bias.to(q.dtype)
    some = None if allowed is None else allowed.any(-1, keepdim=True)
    if allowed is not None and some is not None:  # a query without keys sees all, and is cleared: -inf alone gives NaN
        bias = bias.masked_fill(~(allowed | ~some), -torch.inf)
    width, grouped, (q, k, v) = v.shape[-1], _is_grouped(q, k), pad_to_equal_width(q, k, v)
    out = _fused(q, k, v, attn_mask=bias, scale=scale, enable_gqa=grouped)[..., :width]
    return out if some is None else out.where(some.transpose(1, 2), 0)


def _is_grouped(q: Tensor, k: Tensor) -> bool:
    # Not `return q.shape[-2] != k.shape[-2]`: where heads are symbols, dynamo makes that a symbol too.
    if q.shape[-2] != k.shape[-2]:  # noqa: SIM103
        return True
    return False


def _with_sink(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, causal: bool, scale: float, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Add the sink as a first key with value 0, whose score is the sink's logit for every query.

    Two extra dimensions carry the logit (rounded to q's dtype, and the rounding error); they are 0 in all other keys.
    With causal by index a first query is added too, which the caller drops. Costs 1.2x of attention without sinks.
    """
    logit = upcast(sinks) / scale
    rounded = logit.detach().to(q.dtype)
    extra = torch.stack([(logit - rounded).to(q.dtype), rounded], dim=-1)
    q = torch.cat([q, extra.expand(*q.shape[:-1], 2)], dim=-1)
    sink_key = torch.cat([k.new_zeros(k.shape[-1]), k.new_ones(2)]).expand(k.shape[0], 1, k.shape[2], -1)
    k = torch.cat([sink_key, F.pad(k, (0, 2))], dim=1)
    v = F.pad(v, (0, 0, 0, 0, 1, 0))
    if causal:
        q = F.pad(q, (0, 0, 0, 0, 1, 0))
    elif allowed is not None:
        allowed = F.pad(allowed, (1, 0), value=True)
    return q, k, v, allowed

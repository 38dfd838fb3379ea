"""Keys compressed over time (DeepSeek V4): each complete window of tokens has one key, which is its value too.

A token has numbers c and gates z of the width of a key, or of twice that. The key of a window of r tokens is

    norm(sum_j softmax_j(z_j + b_j) c_j)

over its places j; with windows that overlap, over the first halves of the r tokens of the window before it and the
second halves of its own. It is rotated for the position of the window's first token. Windows
(`fnmodels.inputs.windows`) are those of a document: packed documents share none, and the first window of a document has
none before it. A query sees the keys of the windows that end at or before it.

A cache holds the keys of all windows, and of the last tokens what later windows read of them.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fnmodels.inputs.mask import Mask
from fnmodels.inputs.rules import Causal
from fnmodels.inputs.windows import Windows
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise, pairwise_sum
from fnmodels.ops.linear import linear, linears
from fnmodels.ops.slots import write, write_


class OfTokens(NamedTuple):
    """Inputs of windows per token: numbers and gates [B, T, H or 2 H], positions and segments [B, T]."""

    numbers: Tensor
    gates: Tensor
    positions: Tensor
    segments: Tensor


class WindowKeys(NamedTuple):
    """Keys [B, C, H] of windows; ends, segments: int64 [B, C], the position of a window's last token and its document.

    An empty slot has segment 0.
    """

    keys: Tensor
    ends: Tensor
    segments: Tensor


def of_tokens(weights: Mapping[str, Tensor], x: Tensor, windows: Windows) -> OfTokens:
    """`OfTokens` of x [B, S, D]; weights: "kv_proj" and "gate_proj" [H or 2 H, D].

    Windows of one token need no gates, which are then 0.
    """
    if "gate_proj" in weights:
        numbers, gates = linears(x, weights, ("kv", "gate"))
    else:
        numbers = linear(x, weights["kv_proj"])
        gates = torch.zeros_like(numbers)
    positions, segments = (t.expand(numbers.shape[0], -1) for t in (windows.positions, windows.segments))
    return OfTokens(numbers, gates, positions, segments)


def weighted_sums(tokens: OfTokens, slots: Tensor, bias: Tensor, *, overlap: bool) -> WindowKeys:
    """The sums in the place of keys [B, C, H], before norm and rotation, of T tokens in C = T / r slots.

    slots: `Windows.slots` of these tokens, [B or 1, T]. bias: b, [r, H], or [r, 2 H] of windows that overlap.
    """
    ratio, count = len(bias), tokens.numbers.shape[1] // len(bias)
    slots, places = slots.expand_as(tokens.positions), tokens.positions % ratio
    at = (slots * ratio + places).where(slots >= 0, count * ratio)
    numbers, gates = (
        in_slots(t, at, count * ratio).unflatten(1, (count, ratio)) for t in (tokens.numbers, tokens.gates)
    )
    gates = upcast(gates) + upcast(bias)
    last = last_tokens(tokens, slots, ratio)
    ends, segments = (in_slots(t, last, count) for t in (tokens.positions, tokens.segments))
    if overlap:
        numbers, gates = _with_window_before(numbers, gates, ends, segments)
    share = elementwise(torch.exp, gates - gates.detach().amax(2, keepdim=True))
    share = share / pairwise_sum(share, 2).unsqueeze(2)
    return WindowKeys(pairwise_sum(upcast(numbers) * share, 2).to(tokens.numbers.dtype), ends, segments)


def last_tokens(tokens: OfTokens, slots: Tensor, ratio: int) -> Tensor:
    """int64 [B, T]: the slot of the window that a token completes, C = T / r for the other tokens."""
    completes = (tokens.positions % ratio == ratio - 1) & (slots >= 0)
    return slots.where(completes, tokens.positions.shape[1] // ratio)


def in_slots(x: Tensor, at: Tensor, count: int) -> Tensor:
    """x [B, T, ...] of the tokens whose place `at` [B, T] is below `count`, [B, count, ...]; zeros elsewhere."""
    empty = x.new_zeros(x.shape[0], count + 1, *x.shape[2:])
    index = at.reshape(*at.shape, *[1] * (x.ndim - 2)).expand_as(x)
    return empty.scatter(1, index, x)[:, :count]


def _with_window_before(numbers: Tensor, gates: Tensor, ends: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers and gates [B, C, 2 r, H] of [B, C, r, 2 H]: first halves of the window before, then second halves."""
    ratio, width = numbers.shape[2], numbers.shape[3] // 2
    follows = (segments == segments.roll(1, 1)) & (ends == ends.roll(1, 1) + ratio)
    follows = (follows & (torch.arange(ends.shape[1], device=ends.device) > 0))[..., None, None]
    (c, own_c), (z, own_z) = (t.split(width, -1) for t in (numbers, gates))
    c, z = c.roll(1, 1).where(follows, 0), z.roll(1, 1).where(follows, -torch.inf)
    return torch.cat((c, own_c), 2), torch.cat((z, own_z), 2)


def window_mask(windows: Windows, keys: WindowKeys) -> Mask:
    """The windows that the tokens of `windows` see, those of their document that end by then."""
    return Mask(windows.positions, windows.segments, keys.ends, keys.segments, None, None, Causal())


def continued(held: OfTokens, new: OfTokens) -> OfTokens:
    """The last tokens of before, [B, n, ...], and those of a call, [B, S, ...], in the order in which they came."""
    return OfTokens(*(torch.cat((a.to(b.dtype), b), 1) for a, b in zip(held, new, strict=True)))


def last_of(tokens: OfTokens, count: int) -> OfTokens:
    """The last `count` of the tokens [B, T, ...] that are no padding, in their order; padding where there are fewer."""
    order = (tokens.segments > 0).long().argsort(dim=1, stable=True)[:, tokens.segments.shape[1] - count :]

    def taken(x: Tensor) -> Tensor:
        return x.gather(1, order.reshape(*order.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))

    return OfTokens(*map(taken, tokens))


def appended(held: WindowKeys, new: WindowKeys, fresh: Tensor, *, inplace: bool) -> WindowKeys:
    """The keys of windows [B, C, ...] with those of `new` [B, n, ...] that are `fresh` [B, n] in the next slots."""
    room, free = held.segments.shape[1], (held.segments > 0).sum(1, keepdim=True)
    index = (free + fresh.long().cumsum(1) - 1).where(fresh, room)
    put = write_ if inplace else write
    return WindowKeys(*(put(a, b.to(a.dtype), index) for a, b in zip(held, new, strict=True)))

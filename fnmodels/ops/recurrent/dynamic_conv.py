"""Short causal convolutions beside their input: static, and with taps that depend on the token (Inkling 2, 2026).

Both return (conv(x) + x) / sqrt(number of summands), as a residual connection that keeps the variance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fnmodels.ops.dtypes import upcast

from .before import before_of
from .conv import short_conv, tail_before, taken
from .conv_reads import Reads, reads_of


def preceding(
    x: Tensor,
    segment_ids: Tensor,
    count: int,
    tail: Tensor | None = None,
    last: Tensor | None = None,
    *,
    reads: Reads | None = None,
    kernel: Any = "auto",
) -> tuple[tuple[Tensor, ...], Tensor]:
    """(x of the token j places before each one in its document, for j from 1 to `count`, tail [B, count, C]).

    x: [B, S, C], and so are the results, zeros where a document has no such token. segment_ids, tail, last, reads: as
    for `short_conv` of count + 1 taps.
    """
    length, before = x.shape[1], before_of(kernel, tail)
    if reads is None:
        reads = reads_of(segment_ids, count + 1, x.shape[0], None if tail is None else last, kernel)
    if before is not None:
        tail = tail_before(before, x, reads, count)
    if tail is not None and reads.goes_on:
        x = torch.cat((tail.to(x.dtype), x), dim=1)
    first = x.shape[1] - length
    found = tuple(taken(x, source[:, first:]) for source in reads.sources())
    return found, taken(x, reads.ends)


def residual_conv(
    x: Tensor,
    weight: Any,
    segment_ids: Tensor,
    tail: Tensor | None = None,
    last: Tensor | None = None,
    *,
    reads: Reads | None = None,
    kernel: Any = "auto",
) -> tuple[Tensor, Tensor]:
    """((conv(x) + x) / sqrt(K + 1), tail): of `short_conv` with weight [C, 1, K], in fp32 at least."""
    along_rows = getattr(weight, "along_rows", None)  # of ranks that hold pieces of the rows and convolve all of them
    if along_rows is not None:
        joined: tuple[Tensor, Tensor] = along_rows(
            residual_conv, x, segment_ids, tail, last, reads=reads, kernel=kernel
        )
        return joined
    wide = upcast(x)
    y, after = short_conv(wide, weight[:, 0], None, segment_ids, tail, last, reads=reads, kernel=kernel)
    return ((y + wide) / (weight.shape[-1] + 1) ** 0.5).to(x.dtype), after


def dynamic_conv(
    x: Tensor,
    weight: Tensor,
    dynamic: Tensor,
    segment_ids: Tensor,
    tail: Tensor | None = None,
    last: Tensor | None = None,
    *,
    reads: Reads | None = None,
    kernel: Any = "auto",
) -> tuple[Tensor, Tensor]:
    """((conv(x) + x) / sqrt(2 K + 1), tail [B, K - 1, C]), in fp32 at least, cast back.

        conv(x)_t = sum over j of (weight[j] + dynamic_t[g, j]) x_(t-j)     of channels of head g, over t's own document

    x: [B, S, C] of G heads side by side. weight: [K, C], for the current token first. dynamic: [B, S, G, K]. The rest
    as for `preceding`.
    """
    wide, taps, heads = upcast(x), upcast(weight), dynamic.shape[2]
    before, after = preceding(wide, segment_ids, len(taps) - 1, tail, last, reads=reads, kernel=kernel)
    of_token, total = upcast(dynamic).unbind(-1), wide
    for read, tap, own in zip((wide, *before), taps.unbind(0), of_token, strict=True):
        factors = tap.unflatten(-1, (heads, -1)) + own[..., None]  # [B, S, G, C / G]
        total = total + read * factors.flatten(-2)
    return (total / (2 * len(taps) + 1) ** 0.5).to(x.dtype), after

"""A short causal depthwise convolution along each document, which mixes a token with the K - 1 before it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.cpu.recurrent.conv import conv_by_blocks
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise, rows_are_invariant
from fnmodels.ops.torch_internals import is_plain_eager

from .before import Before, before_of
from .conv_reads import Reads, reads_of


def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segment_ids: Tensor,
    tail: Tensor | None = None,
    last: Tensor | None = None,
    *,
    silu: bool = False,
    overwrite: bool = False,
    reads: Reads | None = None,
    step: int = 1,
    kernel: Any = "auto",
) -> tuple[Tensor, Tensor]:
    """(y [B, S, C], tail [B, K-1, C]): y_t = bias + sum over j of weight[:, K-1-j] x_(t-j), over t's own document.

    x: [B, S, C]. weight: [C, K], for the current token last. bias: [C]. segment_ids: [B or 1, S] int64; padding has no
    effect wherever it stands, and means nothing in y. tail: the last K - 1 inputs of the document that goes on from
    before, zeros where it had fewer; its segment id is `last` [B]. silu: apply it to y, not to the tail.
    step: a dilation: t - j step in place of t - j, and a tail of (K - 1) step inputs.
    overwrite: the caller does not read x again, so that y may be written into it where no gradient is needed, which
        saves the page faults of a new tensor.
    reads: what `reads_of` returns for the same tokens, for several convolutions of them.
    kernel: "math" for all transforms; one with an attribute `before` takes the tail from other processes.
    """
    B, S, _ = x.shape
    held = (weight.shape[1] - 1) * step  # tokens of a tail
    before = before_of(kernel, tail)
    if S == 1 and before is None and tail is not None and last is not None:
        return _next_token(x, weight, bias, segment_ids.expand(B, S), (tail, last), silu, step)
    if reads is None:
        reads = reads_of(segment_ids, held + 1, B, None if tail is None else last, kernel)
    if before is not None:
        kernel = before.kernel
        tail = tail_before(before, x, reads, held)
    if tail is not None and reads.goes_on:
        x = torch.cat((tail.to(x.dtype), x), dim=1)
    after = taken(x, reads.ends)
    return _convolved(x, weight, bias, reads, silu, overwrite, kernel, step)[:, x.shape[1] - S :], after


def tail_before(before: Before, x: Tensor, reads: Reads, held: int) -> Tensor:
    """The last `held` inputs [B, held, C] before these rows x [B, S, C], which are pieces of longer ones."""
    own, slots = taken(x, reads.ends - held), torch.arange(held, device=x.device)
    return before.state(upcast((reads.ends[..., None] == slots).to(x.dtype)), upcast(own))


def _next_token(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    segment_ids: Tensor,
    state: tuple[Tensor, Tensor],
    silu: bool,
    step: int,
) -> tuple[Tensor, Tensor]:
    """`short_conv` of one token per row, which needs no indices: a tenth of the operations."""
    tail, last = state
    held = tail.to(x.dtype).where((last > 0)[:, None, None], 0)
    goes_on, valid = ((t[..., None]) for t in (segment_ids == last[:, None], segment_ids > 0))
    window = torch.cat((held.where(goes_on, 0), x), dim=1)
    wide, taps, exact = upcast(window), upcast(weight).t(), rows_are_invariant()
    y = wide[:, -1] * taps[-1]
    y = y if bias is None else y + upcast(bias)
    for j in range(1, len(taps)):
        read, tap = wide[:, -1 - j * step], taps[-1 - j]
        y = y + read * tap if exact else torch.addcmul(y, read, tap)  # as in `_convolved`
    y = y[:, None].to(x.dtype)
    return elementwise(F.silu, y) if silu else y, window[:, 1:].where(valid, held)


def taken(x: Tensor, index: Tensor) -> Tensor:
    """x [B, S, C] at `index` [B, N], zeros where that is negative: [B, N, C]."""
    index = index[..., None]
    if not x.shape[1]:
        return x.new_zeros(x.shape[0], index.shape[1], x.shape[2])
    return x.gather(1, index.clamp(min=0).expand(-1, -1, x.shape[2])).where(index >= 0, 0)


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    reads: Reads,
    silu: bool,
    overwrite: bool,
    kernel: Any,
    step: int,
) -> Tensor:
    tensors = (x, weight) if bias is None else (x, weight, bias)
    exact = rows_are_invariant()  # then without addcmul, of which vector instructions round once
    eager = kernel != "math" and not exact and x.shape[1] > 1
    by_blocks = eager and step == 1 and is_plain_eager(*tensors, reads.ends)
    near = reads.near() if by_blocks else None
    if near is not None:
        return conv_by_blocks(x, weight, bias, near.flatten(1), silu, overwrite)
    wide = upcast(x)
    y = wide * upcast(weight)[:, -1]
    y = y if bias is None else y + upcast(bias)
    for j, source in enumerate(reads.sources()[step - 1 :: step], 1):
        at = source[..., None]
        read = wide.gather(1, at.clamp(min=0).expand_as(wide)).where(at >= 0, 0)
        tap = upcast(weight)[:, -1 - j]
        y = y + read * tap if exact else torch.addcmul(y, read, tap)  # the same bits as `_block`
    y = y.to(x.dtype)
    return elementwise(F.silu, y) if silu else y

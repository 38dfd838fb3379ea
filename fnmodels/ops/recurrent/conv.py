"""A short causal depthwise convolution along each document, which mixes a token with the K - 1 before it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.autograd_guard import refuse
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise, rows_are_invariant
from fnmodels.ops.torch_internals import alone

from .before import before_of
from .conv_reads import Reads, reads_of

_ELEMENTS = 1 << 18  # of a block of tokens: larger ones leave the cache, in smaller ones the calls take longer
_STRETCHES = 8  # documents in a block; masks of its tokens are faster for more

# bool [K - 1, tokens]: whether each token reads the one j places before it; and the first tokens of documents
_Marks = tuple[Tensor, list[int]]


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
    kernel: Any = "auto",
) -> tuple[Tensor, Tensor]:
    """(y [B, S, C], tail [B, K-1, C]): y_t = bias + sum over j of weight[:, K-1-j] x_(t-j), over t's own document.

    x: [B, S, C]. weight: [C, K], for the current token last. bias: [C]. segment_ids: [B or 1, S] int64; padding has no
    effect wherever it stands, and means nothing in y. tail: the last K - 1 inputs of the document that goes on from
    before, zeros where it had fewer; its segment id is `last` [B]. silu: apply it to y, not to the tail.
    overwrite: the caller does not read x again, so that y may be written into it where no gradient is needed, which
        saves the page faults of a new tensor.
    reads: what `reads_of` returns for the same tokens, for several convolutions of them.
    kernel: "math" for all transforms; one with an attribute `before` takes the tail from other processes.
    """
    B, S, _ = x.shape
    K = weight.shape[1]
    before = before_of(kernel, tail)
    if S == 1 and before is None and tail is not None and last is not None:
        return _next_token(x, weight, bias, segment_ids.expand(B, S), tail, last, silu)
    if reads is None:
        reads = reads_of(segment_ids, K, B, None if tail is None else last, kernel)
    if before is not None:
        kernel = before.kernel
        own, slots = _taken(x, reads.ends - (K - 1)), torch.arange(K - 1, device=x.device)
        tail = before.state(upcast((reads.ends[..., None] == slots).to(x.dtype)), upcast(own))
    if tail is not None and reads.goes_on:
        x = torch.cat((tail.to(x.dtype), x), dim=1)
    after = _taken(x, reads.ends)
    return _convolved(x, weight, bias, reads, silu, overwrite, kernel)[:, x.shape[1] - S :], after


def _next_token(
    x: Tensor, weight: Tensor, bias: Tensor | None, segment_ids: Tensor, tail: Tensor, last: Tensor, silu: bool
) -> tuple[Tensor, Tensor]:
    """`short_conv` of one token per row, which needs no indices: a tenth of the operations."""
    held = tail.to(x.dtype).where((last > 0)[:, None, None], 0)
    goes_on, valid = ((t[..., None]) for t in (segment_ids == last[:, None], segment_ids > 0))
    window = torch.cat((held.where(goes_on, 0), x), dim=1)
    wide, taps, exact = upcast(window), upcast(weight).t(), rows_are_invariant()
    y = wide[:, -1] * taps[-1]
    y = y if bias is None else y + upcast(bias)
    for j in range(2, len(taps) + 1):
        y = y + wide[:, -j] * taps[-j] if exact else torch.addcmul(y, wide[:, -j], taps[-j])  # as in `_convolved`
    y = y[:, None].to(x.dtype)
    return elementwise(F.silu, y) if silu else y, window[:, 1:].where(valid, held)


def _taken(x: Tensor, index: Tensor) -> Tensor:
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
) -> Tensor:
    tensors = (x, weight) if bias is None else (x, weight, bias)
    exact = rows_are_invariant()  # then without addcmul, of which vector instructions round once
    by_blocks = kernel != "math" and not exact and x.shape[1] > 1 and alone(*tensors, reads.ends)
    near = reads.near() if by_blocks else None
    if near is not None:
        if not torch.is_grad_enabled():
            return _by_blocks(x, weight, bias, near.flatten(1), silu, overwrite)
        y: Tensor = _ShortConv.apply(x, weight, bias, near.flatten(1), silu)
        return y
    wide = upcast(x)
    y = wide * upcast(weight)[:, -1]
    y = y if bias is None else y + upcast(bias)
    for j, source in enumerate(reads.sources(), 1):
        at = source[..., None]
        read = wide.gather(1, at.clamp(min=0).expand_as(wide)).where(at >= 0, 0)
        tap = upcast(weight)[:, -1 - j]
        y = y + read * tap if exact else torch.addcmul(y, read, tap)  # the same bits as `_block`
    y = y.to(x.dtype)
    return elementwise(F.silu, y) if silu else y


class _ShortConv(torch.autograd.Function):
    """A block of tokens at a time, whose taps are added up while they are in the cache; it saves its inputs only.

    x: [B, S, C]. read: bool [K - 1, B S], whether each token has a j-th token before it, which stands j places before.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, read: Tensor, silu: bool) -> Tensor:
        return _by_blocks(x, weight, bias, read, silu, overwrite=False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *saved, ctx.silu = inputs
        ctx.save_for_backward(*saved)

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, read = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative
            return _differentiable(x, weight, bias, read, ctx.silu, grad_y, ctx.needs_input_grad)
        flat, grads, taps = x.flatten(0, 1), grad_y.flatten(0, 1), upcast(weight).t().contiguous()
        K, grad_x, marks = len(taps), torch.empty_like(flat), (read, _starts(read))
        grad_taps, grad_bias = torch.zeros_like(taps), taps.new_zeros(taps.shape[1])
        for start, stop in _blocks(flat):
            more = min(stop + K - 1, len(flat))  # the tokens that read this block
            outer = upcast(grads[start:more])
            if ctx.silu:
                before = upcast(_block(flat, taps, bias, marks, start, more).to(x.dtype))
                sigmoid = before.sigmoid()
                outer = (before.mul_(1 - sigmoid).add_(1)).mul_(sigmoid).mul_(outer)
            own, block = outer[: stop - start], upcast(flat[start:stop])
            into = own * taps[-1]
            grad_taps[-1] += (own * block).sum(0)
            for j in range(1, K):
                for low, high, keep in _stretches(marks, j, start + j, min(stop + j, more)):
                    of, by = slice(low - j - start, high - j - start), slice(low - start, high - start)
                    outward = _masked(outer[by], keep)
                    into[of].addcmul_(outward, taps[-1 - j])
                    grad_taps[-1 - j] += (outward * block[of]).sum(0)
            grad_x[start:stop] = into
            if bias is not None:
                grad_bias += own.sum(0)
        of_bias = None if bias is None else grad_bias.to(bias.dtype)
        return grad_x.view(x.shape), grad_taps.t().to(weight.dtype), of_bias, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse("auto")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        refuse("auto")


def _by_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, read: Tensor, silu: bool, overwrite: bool) -> Tensor:
    """The forward pass; overwrite: in x, if that is contiguous.

    The last block comes first, for a block reads tokens of the one before.
    """
    flat, taps, marks = x.flatten(0, 1), upcast(weight).t().contiguous(), (read, _starts(read))
    y = flat if overwrite else torch.empty_like(flat)
    for start, stop in reversed(_blocks(flat)):
        part = y[start:stop]
        if silu:
            torch.ops.aten.silu.out(_block(flat, taps, bias, marks, start, stop).to(x.dtype), out=part)
        elif overwrite or x.dtype is not taps.dtype:
            part.copy_(_block(flat, taps, bias, marks, start, stop))
        else:
            _block(flat, taps, bias, marks, start, stop, out=part)
    return y.view(x.shape)


def _blocks(flat: Tensor) -> list[tuple[int, int]]:
    size = max(1, _ELEMENTS // flat.shape[1])
    return [(start, min(start + size, len(flat))) for start in range(0, len(flat), size)]


def _block(
    flat: Tensor, taps: Tensor, bias: Tensor | None, marks: _Marks, start: int, stop: int, out: Tensor | None = None
) -> Tensor:
    """The convolution of the tokens from start to stop, in fp32 or wider; into `out` if it is given."""
    first = max(0, start - len(taps) + 1)
    wide = upcast(flat[first:stop])
    y = torch.mul(wide[start - first :], taps[-1], out=out)
    if bias is not None:
        y += bias
    for j in range(1, len(taps)):
        for low, high, keep in _stretches(marks, j, start, stop):
            before = _masked(wide[low - j - first : high - j - first], keep)
            y[low - start : high - start].addcmul_(before, taps[-1 - j])
    return y


def _starts(read: Tensor) -> list[int]:
    """The tokens that do not read the one before: a token reads j places before it if none of these stands between."""
    return (~read[0]).nonzero().flatten().tolist() if len(read) else []


def _stretches(marks: _Marks, j: int, low: int, high: int) -> list[tuple[int, int, Tensor | None]]:
    """Ranges of tokens from low to high that read the one j places before; or one, with the mask of those that do."""
    read, starts = marks
    inside = starts[max(bisect_right(starts, low) - 1, 0) : bisect_left(starts, high)]
    if len(inside) > _STRETCHES:
        low = max(low, j)
        return [(low, high, read[j - 1, low:high])] if low < high else []
    ranges = ((max(a + j, low), b) for a, b in zip(inside, (*inside[1:], high), strict=True))
    return [(a, b, None) for a, b in ranges if a < b]


def _masked(rows: Tensor, keep: Tensor | None) -> Tensor:
    return rows if keep is None else rows * keep[:, None]


def _differentiable(
    x: Tensor, weight: Tensor, bias: Tensor | None, read: Tensor, silu: bool, grad_y: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients as a graph that can be differentiated again."""
    y = upcast(x) * upcast(weight)[:, -1]
    y = y if bias is None else y + upcast(bias)
    for j in range(1, weight.shape[1]):
        shifted = F.pad(upcast(x)[:, :-j], (0, 0, min(j, x.shape[1]), 0))
        y = y + shifted * read[j - 1].view(x.shape[:2])[..., None] * upcast(weight)[:, -1 - j]
    y = F.silu(y.to(x.dtype)) if silu else y.to(x.dtype)
    wanted = [t for t, need in zip((x, weight, bias), needed, strict=False) if need and t is not None]
    found = iter(torch.autograd.grad(y, wanted, grad_y, create_graph=True, materialize_grads=True))
    return tuple(next(found) if need else None for need in needed[:3]) + (None, None)

"""The short convolution of `ops.recurrent.conv` by blocks of tokens, whose taps are added up while they are cached.

Row: recurrent step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.autograd_guard import refuse
from fnmodels.ops.dtypes import upcast

_ELEMENTS = 1 << 18  # of a block of tokens: larger ones leave the cache, in smaller ones the calls take longer
_STRETCHES = 8  # documents in a block; masks of its tokens are faster for more

# bool [K - 1, tokens]: whether each token reads the one j places before it; and the first tokens of documents
_Marks = tuple[Tensor, list[int]]


def conv_by_blocks(x: Tensor, weight: Tensor, bias: Tensor | None, read: Tensor, silu: bool, overwrite: bool) -> Tensor:
    """The convolution of x [B, S, C]; overwrite: in x, if that is contiguous and no gradient is needed.

    read: bool [K - 1, B S], whether each token has a j-th token before it, which stands j places before.
    """
    if not torch.is_grad_enabled():
        return _by_blocks(x, weight, bias, read, silu, overwrite)
    y: Tensor = _ShortConv.apply(x, weight, bias, read, silu)
    return y


class _ShortConv(torch.autograd.Function):
    """`conv_by_blocks`; it saves its inputs only."""

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
            grad_block, block = outer[: stop - start], upcast(flat[start:stop])
            into = grad_block * taps[-1]
            grad_taps[-1] += (grad_block * block).sum(0)
            for j in range(1, K):
                for low, high, keep in _stretches(marks, j, start + j, min(stop + j, more)):
                    of, by = slice(low - j - start, high - j - start), slice(low - start, high - start)
                    outward = _masked(outer[by], keep)
                    into[of].addcmul_(outward, taps[-1 - j])
                    grad_taps[-1 - j] += (outward * block[of]).sum(0)
            grad_x[start:stop] = into
            if bias is not None:
                grad_bias += grad_block.sum(0)
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
    inputs = [t for t, need in zip((x, weight, bias), needed, strict=False) if need and t is not None]
    gradients = iter(torch.autograd.grad(y, inputs, grad_y, create_graph=True, materialize_grads=True))
    return tuple(next(gradients) if need else None for need in needed[:3]) + (None, None)

"""Ring attention: keys and values pass from rank to rank, and partial softmax results are merged (arXiv 2310.01889).

It has its own maths, because partial softmax sums are merged: forward and first derivatives, for any `Mask`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup

from fnmodels.inputs.mask import Mask
from fnmodels.ops.attention.relative_bias import Bias
from fnmodels.ops.dtypes import upcast
from train.comm import collectives

# The masks of blocks of local queries over the local keys, over those of the previous rank, and so on: bool
# [B, 1, q, K], or None if all is masked.
Seen = tuple[tuple[Tensor | None, ...], ...]
QUERIES = 1024  # queries per block of scores


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a context-parallel kernel: its ranks, the kernel on a rank, and the options of the attention."""

    group: ProcessGroup
    inner: str
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Bias | None = None


def look(over_all: Mask | Tensor, share: int, group: ProcessGroup) -> Seen:
    """The dense masks `Seen`, from the mask of this rank's queries over all keys; share: positions per rank."""
    rank, ranks = group.rank(), group.size()
    starts = [(rank - turn) % ranks * share for turn in range(ranks)]

    def turn(start: int) -> Tensor:
        keys = slice(start, start + share)
        return over_all[..., keys] if isinstance(over_all, Tensor) else over_all.select(slice(None), keys).dense()

    turns = [turn(start).split(QUERIES, 2) for start in starts]
    return tuple(tuple(allowed if allowed.any() else None for allowed in turn) for turn in turns)


def run(q: Tensor, k: Tensor, v: Tensor, seen: Seen, call: Call) -> Tensor:
    """The result [B, Q, N, Hv] of local queries over all keys. seen: from `look`."""
    groups, repeats, sinks = k.shape[2], q.shape[2] // k.shape[2], call.sinks
    rows = rearrange(q, "b q (g r) h -> b g (q r) h", g=groups)
    k, v = (rearrange(t, "b k g h -> b g k h") for t in (k, v))
    if sinks is not None:
        sinks = upcast(sinks).view(groups, 1, repeats).expand(len(q), -1, q.shape[1], -1).flatten(2)[..., None]
    out, *_ = _Ring.apply(call, seen, QUERIES * repeats, rows, k, v, sinks)
    return rearrange(out, "b g (q r) h -> b q (g r) h", r=repeats)


def _passing(tensor: Tensor, group: ProcessGroup) -> Iterator[Tensor]:
    """Yields the local tensor, then the previous rank's, and so on; the next transfer overlaps with its use."""
    for left in reversed(range(group.size())):
        coming = collectives.shift(tensor, group) if left else None
        yield tensor
        if coming is not None:
            tensor = coming()


def _scores(q: Tensor, k: Tensor, allowed: Tensor, call: Call) -> tuple[Tensor, Tensor | None]:
    """(scores [B, G, Q R, K], -inf where masked; derivative of the softcap there, or None)."""
    scores, derivative = upcast(q @ k.mT) * call.scale, None
    if call.softcap is not None:
        bent = torch.tanh(scores / call.softcap)
        scores, derivative = call.softcap * bent, 1 - bent.square()
    split = scores.unflatten(2, (allowed.shape[2], -1))
    return split.masked_fill(~allowed[:, :, :, None], -torch.inf).flatten(2, 3), derivative


def _finite(top: Tensor) -> Tensor:
    """The maximum to subtract from scores: 0 where no key is visible, so that weights are exp(-inf) and not NaN."""
    return top.masked_fill(top == -torch.inf, 0)


def _shrink(before: Tensor, top: Tensor) -> Tensor:
    """The factor that rescales the merged sums to the new maximum score `top`."""
    return (before - _finite(top)).exp()


def _refuse(*_: Any) -> NoReturn:
    raise NotImplementedError(
        'Attention with method="ring" has first derivatives only: no forward mode, no second derivative, no vmap.'
    )


_REFUSED: Any = staticmethod(_refuse)


class _Ring(torch.autograd.Function):
    """(result [B, G, Q R, Hv], maximum score and sum of weights [B, G, Q R, 1]) of queries [B, G, Q R, H] on all keys.

    It saves t = max(s) and z = sum(e^(s - t)), that is lse = t + log z as two numbers: rounded to one, large scores
    would cost a digit of every gradient. A turn with scores s' merges t* = max(t, s') and z* = z e^(t - t*) + sum(e^(s'
    - t*)). A query that sees no key has lse = -inf and result 0. A sink initialises t, with z = 1.
    """

    @staticmethod
    def forward(
        call: Call, seen: Seen, size: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
    ) -> tuple[Tensor, ...]:
        wide = upcast(q.new_zeros(()))
        top = wide.new_full((*q.shape[:-1], 1), -torch.inf) if sinks is None else sinks
        total = wide.new_full(top.shape, float(sinks is not None))
        out = wide.new_zeros(*q.shape[:-1], v.shape[-1])
        widths = (k.shape[-1], v.shape[-1])
        states = list(zip(*(t.split(size, 2) for t in (top, total, out)), strict=True))
        for turn, both in zip(seen, _passing(torch.cat((k, v), -1), call.group), strict=True):
            keys, values = both.split(widths, -1)
            for i, (rows, allowed) in enumerate(zip(q.split(size, 2), turn, strict=True)):
                if allowed is None:
                    continue
                before, total, out = states[i]
                scores, _ = _scores(rows, keys, allowed, call)
                top = torch.maximum(before, scores.amax(-1, keepdim=True))
                weights, shrink = (scores - _finite(top)).exp(), _shrink(before, top)
                total = total * shrink + weights.sum(-1, keepdim=True)
                states[i] = top, total, out * shrink + upcast(weights.to(v.dtype) @ values)
        top, total, out = (torch.cat(parts, 2) for parts in zip(*states, strict=True))
        total = total.masked_fill(total == 0, 1)
        return (out / total).to(v.dtype), _finite(top), total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *ctx.static, q, k, v, sinks = inputs
        ctx.save_for_backward(q, k, v, sinks, *output)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 7
        *grads, d_sinks = _RingBackward.apply(*ctx.static, grad_output, *ctx.saved_tensors)
        return *(None,) * 3, *grads, d_sinks if ctx.needs_input_grad[-1] else None

    jvp = vmap = _REFUSED


class _RingBackward(torch.autograd.Function):
    """The backward pass as its own Function, so that second derivatives, which would miss the transfers, raise."""

    @staticmethod
    def forward(call: Call, seen: Seen, size: int, grad_output: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
        q, k, v, sinks, out, top, total = saved
        widths = (k.shape[-1], v.shape[-1])
        delta = (upcast(grad_output) * upcast(out)).sum(-1, keepdim=True)
        d_q = torch.zeros_like(upcast(q))
        both = torch.cat((k, v), -1)
        d_both = torch.zeros_like(upcast(both))
        of_rows = [t.split(size, 2) for t in (q, grad_output, top, total, delta, d_q)]
        for turn, part in zip(seen, _passing(both, call.group), strict=True):
            keys, values = part.split(widths, -1)
            for allowed, query, d_out, most, norm, mean, d_query in zip(turn, *of_rows, strict=True):
                if allowed is None:
                    continue
                scores, bend = _scores(query, keys, allowed, call)
                weights = (scores - most).exp() / norm
                d_scores = weights * (upcast(d_out @ values.mT) - mean) * call.scale
                d_scores = (d_scores if bend is None else d_scores * bend).to(q.dtype)
                d_query += d_scores @ keys
                d_both += torch.cat((d_scores.mT @ query, weights.to(v.dtype).mT @ d_out), -1)
            # The gradients travel with their keys and values, and return to their own rank after the last turn.
            d_both = collectives.shift(d_both, call.group)()
        d_k, d_v = d_both.split(widths, -1)
        d_sinks = delta.new_zeros(()) if sinks is None else -(sinks - top).exp() / total * delta
        return d_q.to(q.dtype), d_k.to(k.dtype), d_v.to(v.dtype), d_sinks

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    backward = jvp = vmap = _REFUSED

"""kernel="sparse": attention over chosen keys alone, with time and memory linear in their number.

The chosen keys and values of a few queries are gathered, multiplied and forgotten; the backward pass gathers them
again, so that neither pass holds more than one piece beside its results. It pays where many query heads share a head
of keys, as with latent attention whose projection is applied to queries (`fnmodels.ops.mla.absorbed`): each gathered
key is then read once for all of them.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fnmodels.inputs.values import batched_gradient
from fnmodels.ops.autograd_guard import refuse
from fnmodels.ops.dtypes import upcast

from .choice import Choice

_ELEMENTS = 1 << 19  # gathered elements of a piece: as many as stay in a cache of the processor
_ON_DEVICE = 1 << 26  # of a piece on other devices, which are slow at many small calls


class _Maths(NamedTuple):
    scale: float
    softcap: float | None


class _Piece(NamedTuple):
    """Some queries: their slice of all rows, and the flat places [n, w] and hidden entries [n, w] of their keys.

    hidden: None where all entries are seen. sinks: [n, N] or None.
    """

    rows: slice
    places: Tensor
    hidden: Tensor | None
    sinks: Tensor | None


def sparse_attention(
    q: Tensor, k: Tensor, v: Tensor, choice: Choice, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Shapes as in `ops.attention.select`; each query attends to the keys of `choice`.

    Scores and probabilities are fp32 at least; sums over keys are in the order of the choice.
    ValueError for a choice of other shapes; NotImplementedError in a compiled graph, which would hold every piece.
    """
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            'kernel="sparse" takes queries piece by piece, which a compiled graph would write out: "sdpa" compiles, '
            'and kernel="math" supports every transform.'
        )
    rows, groups, queries, keys = choice.shape
    if (queries, keys) != (q.shape[1], k.shape[1]) or rows not in (1, q.shape[0]) or groups not in (1, k.shape[2]):
        raise ValueError(
            f"The choice is of {queries} queries among {keys} keys in {rows} rows, and q and k are "
            f"{list(q.shape[:2])} and {list(k.shape[:2])}: make it of this batch."
        )
    batch = len(q)
    of_rows = None if sinks is None else upcast(sinks).expand(batch, -1).reshape(batch * groups, -1)
    index, seen = (
        t.unflatten(0, (-1, groups)).expand(batch, -1, -1, -1).flatten(0, 1) for t in (choice.index, choice.seen)
    )
    values = None if v is k else v
    if groups > 1:  # each head of keys as a row of its own
        q, k = (_rows_of_groups(t, groups) for t in (q, k))
        values = None if values is None else _rows_of_groups(values, groups)
    out: Tensor = _Gathered.apply(_Maths(scale, softcap), q, k, values, of_rows, index, seen)
    return out if groups == 1 else out.unflatten(0, (batch, groups)).transpose(1, 2).flatten(2, 3)


def _rows_of_groups(t: Tensor, groups: int) -> Tensor:
    return t.unflatten(2, (groups, -1)).transpose(1, 2).flatten(0, 1)


def _pieces(
    q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None, index: Tensor, seen: Tensor
) -> Iterator[_Piece]:
    """The queries of all rows, flattened, few at a time."""
    batch, queries, most = index.shape
    if not batch * queries * most:
        return
    heads = q.shape[2] // k.shape[2]
    width = k.shape[-1] + (0 if v is None else v.shape[-1]) + 2 * heads
    size = max(1, (_ELEMENTS if index.is_cpu else _ON_DEVICE) // (most * width))
    count = torch.arange(1, most + 1, device=index.device)
    flat, seen = index.flatten(0, 1), seen.flatten(0, 1)
    row = torch.arange(batch, device=index.device).repeat_interleave(queries)
    for rows in (slice(start, start + size) for start in range(0, len(flat), size)):
        width, hidden = most, ~seen[rows]
        if index.is_cpu:  # where reading values does not wait for a device
            width = max(1, int((seen[rows] * count).amax()))  # later entries are seen by no query of the piece
            hidden = hidden[:, :width]
        some = not index.is_cpu or bool(hidden.any())
        places = flat[rows, :width] + row[rows, None] * k.shape[1]
        yield _Piece(rows, places, hidden if some else None, None if sinks is None else sinks[row[rows]])


def _of_queries(t: Tensor, groups: int) -> Tensor:
    """[B, Q, N, H] -> [B Q, G, N / G, H], no copy of what lies in memory row after row, nor of an expanded number."""
    return t.unflatten(2, (groups, -1)).flatten(0, 1)


def _of_keys(t: Tensor) -> Tensor:
    """[B, K, G, H] -> [G, B K, H], a copy where there are several groups."""
    return t.flatten(0, 1).transpose(0, 1).contiguous()


def _weights(piece: _Piece, group: int, maths: _Maths, scores: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """(weights [n, R, w], tanh of the softcap, the sink's weight [n, R, 1 or 0]) of products [n, R, w], overwritten."""
    scores, bent = upcast(scores).mul_(maths.scale), None
    if maths.softcap is not None:
        bent = (scores / maths.softcap).tanh_()
        scores = bent * maths.softcap
    if piece.hidden is not None:
        scores = scores.masked_fill_(piece.hidden[:, None], -torch.inf)
    if piece.sinks is not None:
        heads = scores.shape[1]
        sink = piece.sinks[:, group * heads : (group + 1) * heads, None]
        weights = torch.cat((scores, sink.to(scores.dtype)), -1).softmax(-1)
        return weights[..., :-1], bent, weights[..., -1:]
    weights = scores.softmax(-1)
    if piece.hidden is not None:  # a query that sees no key
        weights = weights.masked_fill_(piece.hidden.all(-1)[:, None, None], 0)
    return weights, bent, weights[..., :0]


class _Memory:
    """Memory that the pieces use again: to allocate it for each would cost as much as to fill it."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def empty(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """An uninitialized tensor, valid until the next call with this name."""
        size = math.prod(shape)
        if name not in self.held or self.held[name].numel() < size:
            self.held[name] = like.new_empty(size)
        return self.held[name][:size].view(shape)

    def gathered(self, name: str, k: Tensor, index: Tensor) -> Tensor:
        """The rows [n, w, H] of k [B K, H] at index [n, w]."""
        rows = self.empty(name, (index.numel(), k.shape[-1]), k)
        torch.index_select(k, 0, index.flatten(), out=rows)
        return rows.view(*index.shape, -1)

    def product(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """a [n, i, j] @ b [n, j, l]."""
        return torch.bmm(a, b, out=self.empty(name, (len(a), a.shape[1], b.shape[2]), a))


class _Gathered(torch.autograd.Function):
    """[B, Q, N, Hv] of q, k, v, sinks [B, N] or None, index and seen [B, Q, k]. v: None where keys are their values."""

    @staticmethod
    def forward(
        maths: _Maths, q: Tensor, k: Tensor, v: Tensor | None, sinks: Tensor | None, index: Tensor, seen: Tensor
    ) -> Tensor:
        groups = k.shape[2]
        qs, ks = _of_queries(q, groups), _of_keys(k)
        vs = ks if v is None else _of_keys(v)
        out = vs.new_zeros(*qs.shape[:3], vs.shape[-1])
        memory = _Memory()
        for piece in _pieces(q, k, v, sinks, index, seen):
            for g in range(groups):
                keys = memory.gathered("keys", ks[g], piece.places)
                weights, *_ = _weights(piece, g, maths, memory.product("scores", qs[piece.rows, g], keys.mT))
                values = keys if v is None else memory.gathered("values", vs[g], piece.places)
                torch.bmm(weights.to(vs.dtype), values, out=out[piece.rows, g])
        return out.view(*q.shape[:3], vs.shape[-1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.maths, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if batched_gradient(grad):
            refuse("sparse")
        saved = ctx.saved_tensors  # read once, as checkpoint requires
        d_q, d_k, *others = _GatheredBackward.apply(ctx.maths, grad, *saved)
        of_given = (None if t is None else d for d, t in zip(others, saved[2:4], strict=True))  # v and sinks
        return None, d_q, d_k, *of_given, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse("sparse")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], maths: _Maths, *tensors: Tensor | None) -> tuple[Tensor, int]:
        joined = _joined(info.batch_size, in_dims[1:], tensors)
        return _Gathered.apply(maths, *joined).unflatten(0, (info.batch_size, -1)), 0


class _GatheredBackward(torch.autograd.Function):
    """The gradients of q, k, v and sinks; the weights are computed again. Without v, that of k is of its values too."""

    @staticmethod
    def forward(
        maths: _Maths,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        sinks: Tensor | None,
        index: Tensor,
        seen: Tensor,
    ) -> tuple[Tensor, ...]:
        groups = k.shape[2]
        (qs, gs), ks = (_of_queries(t, groups) for t in (q, grad)), _of_keys(k)
        vs = ks if v is None else _of_keys(v)
        d_q = qs.new_zeros(qs.shape)
        wide = upcast(q.new_zeros(()))
        d_k = wide.new_zeros(ks.shape)  # sums over queries
        d_v = d_k if v is None else wide.new_zeros(vs.shape)
        d_sinks = wide.new_zeros(1) if sinks is None else wide.new_zeros(*q.shape[:3]).flatten(0, 1)
        memory = _Memory()
        for piece in _pieces(q, k, v, sinks, index, seen):
            at = piece.places.flatten()
            for g in range(groups):
                query, d_out = qs[piece.rows, g], gs[piece.rows, g].contiguous()
                keys = memory.gathered("keys", ks[g], piece.places)
                values = keys if v is None else memory.gathered("values", vs[g], piece.places)
                weights, bent, sunk = _weights(piece, g, maths, memory.product("scores", query, keys.mT))
                d_scores = upcast(memory.product("d_weights", d_out, values.mT))
                rows = memory.product("rows", weights.to(vs.dtype).mT, d_out)
                if v is not None:
                    d_v[g].index_add_(0, at, upcast(rows).flatten(0, 1))
                mean = (weights * d_scores).sum(-1, keepdim=True)
                d_scores = d_scores.sub_(mean).mul_(weights).mul_(maths.scale)
                d_scores = (d_scores if bent is None else d_scores * (1 - bent.square())).to(q.dtype)
                torch.bmm(d_scores, keys, out=d_q[piece.rows, g])
                if v is None:
                    rows = torch.baddbmm(rows, d_scores.mT, query, out=rows)
                else:
                    rows = memory.product("rows", d_scores.mT, query)
                d_k[g].index_add_(0, at, upcast(rows).flatten(0, 1))
                if sinks is not None:
                    heads = slice(g * query.shape[1], (g + 1) * query.shape[1])
                    d_sinks[piece.rows, heads] = -(sunk * mean)[..., 0]
        if v is None:
            d_v = wide.new_zeros(1)
        else:
            d_v = d_v.transpose(0, 1).reshape(v.shape).to(v.dtype)
        if sinks is not None:
            d_sinks = d_sinks.unflatten(0, q.shape[:2]).sum(1)
        return d_q.view(q.shape), d_k.transpose(0, 1).reshape(k.shape).to(k.dtype), d_v, d_sinks

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is saved: `ops.autograd_guard.first_order` refuses a second derivative before."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse("sparse")

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], maths: _Maths, *tensors: Tensor | None) -> tuple[Any, Any]:
        joined = _joined(info.batch_size, in_dims[1:], tensors)
        grads = _GatheredBackward.apply(maths, *joined)
        dims = (0, 0, *(None if t is None else 0 for t in joined[3:5]))  # of q, k, v and sinks
        split = (t if d is None else t.unflatten(0, (info.batch_size, -1)) for t, d in zip(grads, dims, strict=True))
        return tuple(split), dims


def _joined(size: int, dims: tuple[Any, ...], tensors: tuple[Tensor | None, ...]) -> list[Tensor | None]:
    """The tensors with the dimension of vmap joined to their first, [size B, ...]."""
    moved = [
        t if t is None else (t.expand(size, *t.shape) if dim is None else t.movedim(dim, 0))
        for t, dim in zip(tensors, dims, strict=True)
    ]
    return [None if t is None else t.flatten(0, 1) for t in moved]

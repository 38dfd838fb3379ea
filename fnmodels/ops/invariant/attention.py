"""kernel="invariant": the result of a query depends, to the bit, on the tokens of its document alone.

Not on other documents, rows or padding, and not on the form in which keys arrive: one row, packed rows, chunks, or the
slots of a cache. For that, every sum is taken over fixed tiles of 128 positions, aligned at multiples of 128, one tile
after the other: a key's place in the sums is its position, and tiles without visible keys add exact zeros. The number
of rows of a product is a multiple of 4, 8 or 16 (`least_rows`): then the bits of each row do not depend on the others.
The backward pass recomputes the probabilities, in the same tiles. Products are in fp32 at least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.mask import Mask, MaskLike
from fnmodels.inputs.values import readable
from fnmodels.ops.autograd_guard import refuse
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import SUMMED

TILE = 128  # positions
WIDTH = 16  # a product has a multiple of so many columns

GAPS = 16  # places per token of a document, at most

Bounds = tuple[int, int]


@tree.pytree
@dataclass(frozen=True)
class Tiles:
    """A batch sorted into documents: each is a row of tiles of keys, and of queries.

    queries [R, Q], keys [R, K]: int64, indices of the flattened tokens [B * S], or B * S at empty places; None where
    row r is row r of the batch, in order. places: int64 [B, S], where the result of each query is in [R * Q], or R * Q.
    masks: bool [R or 1, Q of a tile, TILE] of the pairs (tile of queries, tile of keys) in which some keys are hidden.
    """

    queries: Tensor | None
    keys: Tensor | None
    places: Tensor | None
    masks: tuple[Tensor, ...]
    seen: tuple[Bounds, ...] = tree.static()  # for each tile of queries: its first tile of keys, and the end
    hidden: tuple[tuple[Bounds, ...], ...] = tree.static()  # for each: pairs (tile of keys, index in masks)
    shape: tuple[int, int, int] = tree.static()  # B, queries, keys of the batch
    aligned: bool = tree.static()  # queries are placed by position, as keys are

    def masks_of(self, tile: int) -> list[tuple[int, Tensor]]:
        """The masks of a tile of queries."""
        return [(keys, self.masks[index]) for keys, index in self.hidden[tile]]


def plan_tiles(mask: MaskLike, chosen: Tensor | None = None) -> Tiles:
    """The tiles of a batch, from values. ValueError for a mask without rules, and for positions that repeat.

    chosen: bool [B, 1, Q, K]; of the keys that the mask allows, those that queries chose. None: all.
    """
    if not isinstance(mask, Mask):
        raise ValueError(
            f'kernel="invariant" reads positions: give it a fnmodels.inputs.Mask, not a {type(mask).__name__}, or take '
            'kernel="sdpa".'
        )
    if torch.compiler.is_compiling() or not all(readable(t) for t in tree.leaves(mask)):
        raise NotImplementedError(
            'kernel="invariant" reads positions on the host, which vmap and compiled graphs do not allow: '
            'kernel="math" supports every transform.'
        )
    batch = max(t.shape[0] for t in tree.leaves(mask))
    whole = mask.q_positions is mask.kv_positions and mask.q_segments is mask.kv_segments
    q = _side(batch, mask.q_positions, mask.q_segments, mask.q_spans)
    k = _side(batch, mask.kv_positions, mask.kv_segments, mask.kv_spans)
    highest = max(int(t.amax()) if t.numel() else 0 for t in (q.segments, k.segments)) + 1
    documents = torch.unique(q.documents(highest)[q.segments > 0])
    keys = _places(k, documents, highest, None)
    queries = keys if whole else _places(q, documents, highest, k)
    (q_positions, q_segments, q_spans), (k_positions, k_segments, k_spans) = q.sorted(queries), k.sorted(keys)
    order = Mask(q_positions, q_segments, k_positions, k_segments, q_spans, k_spans, mask.rule)
    taken = None if chosen is None else _taken(chosen[:, 0], queries, keys)
    masks, seen, hidden = _tiles_of(order, taken)
    shape = batch, q.positions.shape[1], k.positions.shape[1]
    plain = [None if _in_order(side, tokens) else side for side, tokens in ((queries, q), (keys, k))]
    places = None if plain[0] is None else _inverse(queries, q.positions)
    return Tiles(plain[0], plain[1], places, masks, seen, hidden, shape, whole)


@dataclass(frozen=True)
class _Side:
    """The queries or the keys of a mask, [B, S]."""

    positions: Tensor
    segments: Tensor
    spans: Tensor | None

    def documents(self, highest: int) -> Tensor:
        """[B, S]: a number for each document of the batch."""
        return torch.arange(len(self.segments), device=self.segments.device)[:, None] * highest + self.segments

    def sorted(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """positions, segments (0 at empty places) and spans by `places` [R, n]."""

        def placed(t: Tensor) -> Tensor:
            return F.pad(t.flatten(), (0, 1))[places]

        return placed(self.positions), placed(self.segments), None if self.spans is None else placed(self.spans)


def _side(rows: int, positions: Tensor, segments: Tensor, spans: Tensor | None) -> _Side:
    wide = None if spans is None else spans.expand(rows, -1)
    return _Side(positions.expand(rows, -1), segments.expand(rows, -1), wide)


def _places(side: _Side, documents: Tensor, highest: int, keys: _Side | None) -> Tensor:
    """int64 [R, n]: the tokens of each document, by position, or (queries apart from their keys) one after the other.

    An empty place holds the number of tokens.
    """
    segments, count = side.segments, side.segments.numel()
    number = side.documents(highest)
    row = torch.searchsorted(documents, number).clamp(max=max(len(documents) - 1, 0))
    valid = (segments > 0) & (documents[row] == number) if len(documents) else torch.zeros_like(segments > 0)
    row, position, token = row[valid], side.positions[valid], valid.flatten().nonzero()[:, 0]
    if not len(token):
        return torch.full((len(documents), TILE), count, device=segments.device)
    if keys is None:
        first = position.new_full((len(documents),), int(position.amax())).scatter_reduce(0, row, position, "amin")
        slot = position - first[row] // TILE * TILE
        room = -(-(int(slot.amax()) + 1) // TILE) * TILE
        longest = int(row.bincount().amax())
        if room > GAPS * longest + 2 * TILE:
            raise ValueError(
                f'kernel="invariant" keeps a place for each position, and a document of at most {longest} tokens has '
                f'positions that span {room}; kernel="sdpa" takes any.'
            )
    else:
        same = torch.nn.functional.one_hot(row, len(documents)).cumsum(0)
        slot = same.gather(1, row[:, None])[:, 0] - 1
        room = int(slot.amax()) + 1
    places = torch.full((len(documents) * room,), count, device=segments.device)
    places[row * room + slot] = token
    if int((places < count).sum()) < len(token):
        raise ValueError(
            'kernel="invariant" needs positions that differ within a document, since a key\'s place in the sums is its '
            'position; kernel="math" and kernel="sdpa" take any.'
        )
    return places.view(len(documents), room)


def _in_order(places: Tensor, side: _Side) -> bool:
    """Whether document r is row r with its tokens in order, padding at most behind them."""
    rows, length = side.positions.shape
    if places.shape[0] != rows or places.shape[1] < length:
        return False
    order = torch.arange(rows * length, device=places.device).view(rows, length)
    return bool(((places[:, :length] == order) | (side.segments <= 0)).all())


def _inverse(places: Tensor, like: Tensor) -> Tensor:
    """int64 like `like` [B, S]: the index in the flattened `places` of each token, or their number."""
    index = torch.full((like.numel() + 1,), places.numel(), device=places.device)
    return index.scatter(0, places.flatten(), torch.arange(places.numel(), device=places.device))[:-1].view(like.shape)


def _taken(chosen: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """chosen [B, Q, K] by the places of queries [R, n] and keys [R, m]: [R, n, m]; any value at empty places."""
    rows, count, length = chosen.shape
    q, k = queries.clamp(max=rows * count - 1), keys.clamp(max=rows * length - 1)
    return chosen[q[:, :, None] // count, q[:, :, None] % count, k[:, None] % length]


def _tiles_of(
    mask: Mask, taken: Tensor | None
) -> tuple[tuple[Tensor, ...], tuple[Bounds, ...], tuple[tuple[Bounds, ...], ...]]:
    """(masks, seen, hidden) as in `Tiles`, of the sorted batch. taken: bool [R, queries, keys] as the mask."""
    masks: list[Tensor] = []
    seen, hidden = [], []
    for lo in range(0, mask.q_positions.shape[1], TILE):
        tile = mask.select(slice(lo, lo + TILE), slice(None)).dense()[:, 0]
        tile = (tile if taken is None else tile & taken[:, lo : lo + TILE]).unflatten(-1, (-1, TILE))
        some, every = tile.any(-1).any(1).any(0).tolist(), tile.all(-1).all(1).all(0).tolist()
        first = some.index(True) if True in some else 0
        end = len(some) - some[::-1].index(True) if True in some else 0
        pairs = []
        for keys in range(first, end):
            if not every[keys]:
                tile_mask = tile[:, :, keys]
                masks.append(tile_mask[:1] if bool((tile_mask == tile_mask[:1]).all()) else tile_mask.contiguous())
                pairs.append((keys, len(masks) - 1))
        seen.append((first, end))
        hidden.append(tuple(pairs))
    return tuple(masks), tuple(seen), tuple(hidden)


def least_rows(width: int) -> int:
    """The number of rows of a product is a multiple of this, for heads of this width.

    Measured with AVX-512 (MKL): a row's bits differ between products of 2 rows and larger ones, for heads of 96 and
    more also between 4 rows and more, and for heads of 192 and more also between 6 or 8 rows and more.
    """
    return 4 if width <= 80 else 8 if width <= 128 else 16


def invariant_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: Tiles, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Shapes as in `ops.attention.select`. ValueError for tensors that are not of the plan's batch."""
    if (q.shape[0], q.shape[1], k.shape[1]) != plan.shape:
        raise ValueError(
            f"The mask was made ready for {plan.shape} rows, queries and keys, but q is {list(q.shape)} and k "
            f"{list(k.shape)}."
        )
    groups, width, dtype = k.shape[2], v.shape[3], v.dtype
    repeats = q.shape[2] // groups
    q, k, v = (F.pad(upcast(t), (0, -t.shape[3] % WIDTH)) if t.shape[3] % WIDTH else upcast(t) for t in (q, k, v))
    k, v = (_rows(t, plan.keys, TILE) for t in (k, v))
    least = least_rows(max(q.shape[3], v.shape[3]))
    q = _rows(q, plan.queries, TILE if plan.aligned else least // math.gcd(least, repeats))
    rows, length = q.shape[:2]
    q = q.unflatten(2, (groups, repeats)).permute(0, 2, 3, 1, 4).reshape(rows * groups, repeats, length, -1)
    each = None if sinks is None else upcast(sinks).view(1, groups, repeats).expand(rows, -1, -1).flatten(0, 1)
    run = _Tiled.apply if torch.is_grad_enabled() else _Tiled.forward  # a Function's call takes longer than a step
    out = run(q, _by_head(k), _by_head(v), each, plan, scale, softcap)[0][..., :width]
    out = out.to(dtype).unflatten(0, (rows, groups)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [R, Q, N, Hv]
    if plan.queries is None or plan.places is None:
        return out[:, : plan.shape[1]]
    return F.pad(out[:, : plan.queries.shape[1]].flatten(0, 1), (0, 0, 0, 0, 0, 1))[plan.places]


def dot_products(rows: Tensor, columns: Tensor) -> Tensor:
    """rows [B, m, d] times columns [B, n, d]: [B, m, n], each with the bits of its row and column alone."""
    m, n, d = rows.shape[1], columns.shape[1], rows.shape[2]
    rows = F.pad(rows, (0, -d % WIDTH, 0, -m % least_rows(d)))
    columns = F.pad(columns, (0, -d % WIDTH, 0, -n % TILE))
    return torch.bmm(rows, columns.mT)[:, :m, :n]


def _rows(t: Tensor, places: Tensor | None, multiple: int) -> Tensor:
    """t [B, S, ...] by `places`, [R, n, ...], filled up with zeros to a multiple of tokens."""
    if places is not None:
        t = F.pad(t.flatten(0, 1), (0, 0, 0, 0, 0, 1)).index_select(0, places.flatten()).unflatten(0, places.shape)
    return F.pad(t, (0, 0, 0, 0, 0, -t.shape[1] % multiple)) if t.shape[1] % multiple else t


def _by_head(t: Tensor) -> Tensor:
    """t [R, K, G, H] as [R * G, K, H]; a view where each head's rows are neighbours, as in a cache."""
    t = t.transpose(1, 2)
    return (t if t.stride(2) == t.shape[3] else t.contiguous()).flatten(0, 1)


class _Tiled(torch.autograd.Function):
    """Attention of q [R, n, Q, H], k [R, K, H], v [R, K, Hv]; R rows and groups, n query heads share a head of keys.

    sinks [R, n] or None. Returns the result, and per query the greatest score and the sum. With o the result, p the
    probabilities and D = (o . grad o) per query, the scores' gradient is p (grad p - D).
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: Tiles, scale: float, softcap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        spans = [slice(tile * TILE, (tile + 1) * TILE) for tile in range(len(plan.seen))]
        parts = [_of_tile(q[:, :, s], k, v, sinks, plan, tile, scale, softcap) for tile, s in enumerate(spans)]
        out, top, total = parts[0] if len(parts) == 1 else (torch.cat(part, 2) for part in zip(*parts, strict=True))
        return out, top, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, plan, scale, softcap = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output)
        ctx.how = plan, scale, softcap

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse("invariant")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        refuse("invariant")

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, top, total = ctx.saved_tensors
        plan, scale, softcap = ctx.how
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        along = (out * grad_output).sum(-1, keepdim=True)
        for tile, (first, end) in enumerate(plan.seen):
            if first == end:
                continue
            span, keys = slice(tile * TILE, (tile + 1) * TILE), slice(first * TILE, end * TILE)
            scores, derivative = _scores(q[:, :, span], k, plan, tile, scale, softcap)
            p = scores.sub_(top[:, :, span]).exp_().div_(total[:, :, span]).flatten(1, 2)
            of_out = grad_output[:, :, span].flatten(1, 2)
            _add_product(dv[:, keys], p, of_out)
            ds = torch.bmm(of_out, v[:, keys].mT).sub_(along[:, :, span].flatten(1, 2)).mul_(p)
            if derivative is not None:
                ds *= derivative.flatten(1, 2)
            tile_q = q[:, :, span].flatten(1, 2)
            _add_product(dk[:, keys], ds, tile_q * scale)
            dq[:, :, span] = (_weighted(ds, k, first, end) * scale).view(*q.shape[:2], -1, q.shape[3])
        of_sinks = None
        if sinks is not None:
            of_sinks = -((sinks[:, :, None, None] - top).exp() / total * along).sum((2, 3))
        return dq, dk, dv, of_sinks, None, None, None


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left [R, rows, K] transposed times right [R, rows, H] to out [R, K, H], a part of the rows at a time."""
    for a, b in zip(left.split(SUMMED, 1), right.split(SUMMED, 1), strict=True):
        out.baddbmm_(a.mT, b)


def _of_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    plan: Tiles,
    tile: int,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_Tiled`'s results of a tile of queries."""
    first, end = plan.seen[tile]
    if first == end:
        none = q.new_zeros(*q.shape[:3], 1)
        return v.new_zeros(*q.shape[:3], v.shape[2]), none, none + 1
    scores, _ = _scores(q, k, plan, tile, scale, softcap)
    most = scores.amax(-1, keepdim=True)
    if sinks is not None:
        most = torch.maximum(most, sinks[:, :, None, None])
    most.masked_fill_(most == -torch.inf, 0)
    p = scores.sub_(most).exp_()
    sums = _in_turn(p)
    if sinks is not None:
        sums = sums + (sinks[:, :, None, None] - most).exp()
    sums.masked_fill_(sums == 0, 1)
    return _weighted(p.flatten(1, 2), v, first, end).view(*p.shape[:3], -1).div_(sums), most, sums


def _scores(
    q: Tensor, k: Tensor, plan: Tiles, tile: int, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor | None]:
    """(scores [R, n, Q, keys that the tile of queries sees], their derivative by the scores before the softcap)."""
    first, end = plan.seen[tile]
    scores = torch.bmm((q * scale).flatten(1, 2), k[:, first * TILE : end * TILE].mT).view(*q.shape[:3], -1)
    derivative = None
    if softcap is not None:
        capped = torch.tanh(scores / softcap)
        scores, derivative = softcap * capped, 1 - capped.square()
    for keys, mask in plan.masks_of(tile):
        if 1 < mask.shape[1] < q.shape[2]:
            mask = F.pad(mask, (0, 0, 0, q.shape[2] - mask.shape[1]))
        at = (keys - first) * TILE
        scores.unflatten(0, (len(mask), -1))[..., at : at + TILE].masked_fill_(~mask[:, None, None], -torch.inf)
    return scores, derivative


def _in_turn(p: Tensor) -> Tensor:
    """The sum over the last dimension, [..., 1], tile by tile."""
    first, *rest = p.unflatten(-1, (-1, TILE)).sum(-1).split(1, -1)
    for part in rest:
        first = first + part
    return first


def _weighted(p: Tensor, v: Tensor, first: int, end: int) -> Tensor:
    """p [R, rows, keys from tile `first` to `end`] times v [R, K, H], tile by tile."""
    out = torch.bmm(p[:, :, :TILE], v[:, first * TILE : (first + 1) * TILE])
    for tile in range(first + 1, end):
        at = (tile - first) * TILE
        out.baddbmm_(p[:, :, at : at + TILE], v[:, tile * TILE : (tile + 1) * TILE])
    return out

"""The lightning indexer (DeepSeek-V3.2, arXiv 2512.02556): cheap scores of all keys, by which attention chooses a few.

score = sum over the indexer's heads h of w_h relu(q_h . k), with one key for all heads. A query attends to the `count`
visible keys with the largest scores, or to all where fewer are visible.

A choice is a tensor [B, Q, k] that names each key by its position in the query's own document, -1 for none. Names
therefore survive packing, padding, permutations and caches, in which the index of a key in its row changes. Where a
mask has no positions (a bool tensor, a BlockMask) keys are named by their index. The choice has no gradient.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from fnmodels.inputs.convert import to_dense
from fnmodels.inputs.mask import Mask, MaskLike
from fnmodels.inputs.rules import Tokens
from fnmodels.ops.dtypes import upcast

from .attention.choice import Choice, named_once
from .invariant.attention import dot_products
from .invariant.rows import pairwise_sum, rows_are_invariant
from .linear import linear
from .mla import LATENT_EPS, Rotate
from .norm import layer_norm

_MOST = 1 << 24  # scores of all heads that are in memory at once


@dataclass(frozen=True)
class Indexer:
    """Settings of an indexer.

    count: keys of a query. rotate: the rotary layout, of the first dimensions or of the last. norm_eps: of the keys'
    LayerNorm, in most models whatever eps the config sets for the others. latent_eps: of the norm of the latent that
    queries are projected from, which attention has too.
    scaled: a function of queries [B, Q, heads, d] and the indexer's weights, applied before they are rotated.
    """

    count: int
    rotate: Rotate
    norm_eps: float = 1e-6
    latent_eps: float = LATENT_EPS
    scaled: Callable[[Tensor, Mapping[str, Tensor]], Tensor] | None = None


class KeysOfRanks(Protocol):
    """The attribute `keys_of_ranks` of a kernel whose rows are pieces of longer ones, the rest of which other processes
    hold: queries choose among the keys of all, and the kernel takes a dense mask of its own queries over all keys. All
    processes make the same calls in the same order.
    """

    def mask(self, mask: MaskLike) -> Mask:
        """The mask of this piece's queries over the keys of all pieces."""
        ...

    def gather(self, k: Tensor) -> Tensor:
        """The keys [B, K, d] of all pieces, of this one's [B, S, d]; without a gradient."""
        ...


def keys_of_ranks(kernel: Any) -> KeysOfRanks | None:
    """The `KeysOfRanks` of a kernel, or None where all keys are here."""
    keys: KeysOfRanks | None = getattr(kernel, "keys_of_ranks", None)
    return keys


@dataclass(frozen=True)
class Keys:
    """The keys that queries may choose, and the segments and positions that identify them.

    mask: in any form; heads with masks of their own choose together. q_segments: [B or 1, Q].
    segments, positions: [B or 1, K]; positions count from 0 and differ within a document.
    among: bool [B, Q, K], the keys that queries choose among; None: all of the mask.
    """

    mask: MaskLike
    q_segments: Tensor
    segments: Tensor
    positions: Tensor
    among: Tensor | None = None

    def allowed(self, queries: slice = slice(None)) -> Tensor:
        """bool [B or 1, Q, K] of these queries."""
        if isinstance(self.mask, Mask):
            seen = self.mask.select(queries, slice(None)).dense().squeeze(1)
        else:
            seen = to_dense(self.mask)[:, :, queries].any(dim=1)
        return seen if self.among is None else seen & self.among[:, queries]

    def dense(self) -> Tensor:
        """bool [B or 1, N or 1, Q, K] of all queries, of each head that has a mask of its own."""
        seen = to_dense(self.mask)
        return seen if self.among is None else seen & self.among.unsqueeze(1)


def keys_of(mask: MaskLike) -> Keys:
    """The keys of a mask in any form; a `Mask` stays as small as it is."""
    if isinstance(mask, Mask):
        return Keys(mask, mask.q_segments, mask.kv_segments, mask.kv_positions)
    dense = to_dense(mask)
    queries, index = dense.shape[-2], torch.arange(dense.shape[-1], device=dense.device)[None]
    return Keys(dense, index.new_zeros(1, queries), torch.zeros_like(index), index)


def index_keys(weights: Mapping[str, Tensor], x: Tensor, freqs: Tensor, how: Indexer) -> Tensor:
    """The indexer's keys [B, S, d] of x [B, S, D], which a cache holds. freqs: table [B, S, R/2, 2] with R <= d."""
    k = linear(x, weights["k_proj"])
    k = layer_norm(k, weights["k_norm"], weights["k_norm_bias"], eps=how.norm_eps)
    return how.rotate(k.unsqueeze(-2), freqs).squeeze(-2)


def choose(
    weights: Mapping[str, Tensor], x: Tensor, latent: Tensor, k: Tensor, freqs: Tensor, keys: Keys, how: Indexer
) -> Tensor:
    """The choice [B, Q, min(count, K)] of the queries of x [B, Q, D], best first.

    latent: what queries are projected from, [B, Q, rank]. k: `index_keys` of all keys, [B, K, d]. Equal scores, as
    where no head's product is positive, are ranked by position, the latest first.
    """
    q, share = index_queries(weights, x, latent, k.shape[-1], freqs, how)
    order = keys.positions.argsort(dim=-1, descending=True, stable=True)
    names = keys.positions.gather(-1, order).unsqueeze(-2)
    parts = []
    for rows in pieces(q.shape[1], q.shape[0] * q.shape[2] * k.shape[1]):
        scores = index_scores(q[:, rows], share[:, rows], k)
        scores = scores.masked_fill(~keys.allowed(rows), -torch.inf)
        ranked = scores.gather(-1, order.unsqueeze(-2).expand(scores.shape))
        best, at = ranked.sort(dim=-1, descending=True, stable=True)
        best, at = best[..., : how.count], at[..., : how.count]
        chosen = names.expand(ranked.shape).gather(-1, at)
        parts.append(chosen.where(best != -torch.inf, -1))  # NaN is chosen, so that it shows in the result
    return torch.cat(parts, dim=1)


def index_queries(
    weights: Mapping[str, Tensor], x: Tensor, latent: Tensor, width: int, freqs: Tensor, how: Indexer
) -> tuple[Tensor, Tensor]:
    """The indexer's queries [B, Q, heads, d] and the weights of its heads [B, Q, heads]. width: d; else as `choose`.

    They are of a LayerNorm of the latent where the indexer has its weight, `input_scale`.
    """
    if "input_scale" in weights:
        latent = layer_norm(latent, weights["input_scale"], weights["input_shift"], eps=how.norm_eps)
    q = linear(latent, weights["q_b_proj"]).unflatten(-1, (-1, width))
    q = how.rotate(q if how.scaled is None else how.scaled(q, weights), freqs)
    of_heads = weights["weights_proj"]  # which may be wider than x
    share = linear(x.to(torch.promote_types(x.dtype, of_heads.dtype)), of_heads)
    return q, upcast(share) * (q.shape[2] * width) ** -0.5


def index_scores(q: Tensor, share: Tensor, k: Tensor) -> Tensor:
    """Scores [B, Q, K] of q [B, Q, heads, d] and k [B, K, d], weighted by share [B, Q, heads].

    Within `invariant_rows`, products and sums have an order that does not depend on the other queries and keys.
    """
    if rows_are_invariant():
        products = dot_products(upcast(q).flatten(1, 2), upcast(k)).unflatten(1, q.shape[1:3])
        return pairwise_sum(share.unsqueeze(-1) * products.relu(), 2)
    products = upcast(q).flatten(1, 2) @ upcast(k).transpose(-1, -2)
    return (share.unsqueeze(-2) @ products.unflatten(1, q.shape[1:3]).relu()).squeeze(-2)


def pieces(queries: int, scores: int) -> Iterator[slice]:
    """Slices of the queries, each of which has `scores`. A compiled graph has one: it serves rows of any length."""
    if torch.compiler.is_compiling():
        return iter((slice(None),))
    step = max(1, _MOST // max(1, scores))
    return (slice(start, start + step) for start in range(0, max(queries, 1), step))


def all_visible(keys: Keys) -> Tensor:
    """The choice [B or 1, Q, K] of all keys that queries may choose."""
    return keys.positions.unsqueeze(-2).where(keys.allowed(), -1)


def chosen(keys: Keys, choices: Tensor) -> Tensor:
    """bool [B, N or 1, Q, K]: the mask of the keys that choices [B, Q, k] names, of those that queries may choose."""
    index, known = _places(keys, choices)
    return Choice(index, known, keys.positions.shape[1]).dense() & keys.dense()


def chosen_places(keys: Keys, choices: Tensor) -> Choice:
    """`chosen` as the places of those keys, whose memory is linear in k. ValueError for masks that differ by head."""
    index, known = _places(keys, choices)
    return named_once(index, known & visible(keys, index), keys.positions.shape[1])


def visible(keys: Keys, index: Tensor) -> Tensor:
    """bool [B, Q, k]: whether queries may choose the keys at index [B, Q, k]."""
    seen = _visible(keys.mask, index)
    return seen if keys.among is None else seen & keys.among.gather(-1, index)


def _places(keys: Keys, choices: Tensor) -> tuple[Tensor, Tensor]:
    """(index of the named key in its row, whether there is one), each [B, Q, k], of choices [B, Q, k]."""
    length, many = keys.positions.shape[1], choices.shape[0]
    span = keys.positions.amax(dim=1, keepdim=True) + 1
    code = (keys.segments.clamp(min=0) * span + keys.positions).expand(many, length)
    ordered, order = code.sort(dim=-1)
    known = (choices >= 0) & (choices < span.unsqueeze(-1))
    chosen_codes = (keys.q_segments.clamp(min=0) * span).unsqueeze(-1) + choices
    chosen_codes = chosen_codes.where(known, -1).flatten(1)
    at = torch.searchsorted(ordered, chosen_codes).clamp(max=length - 1)
    index, same = order.gather(1, at), ordered.gather(1, at) == chosen_codes
    return index.unflatten(1, choices.shape[1:]), same.unflatten(1, choices.shape[1:])


def _visible(mask: MaskLike, index: Tensor) -> Tensor:
    """bool [B, Q, k]: whether queries see the keys at index [B, Q, k]."""
    if not isinstance(mask, Mask):
        dense = to_dense(mask)
        if dense.shape[1] != 1:
            raise ValueError(f"A choice is of all heads, and this mask differs between {dense.shape[1]} heads.")
        return dense[:, 0].expand(index.shape[0], -1, -1).gather(-1, index)

    def of_keys(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return tensor.expand(index.shape[0], -1).gather(1, index.flatten(1)).unflatten(1, index.shape[1:])

    def of_queries(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.unsqueeze(-1)

    q, kv = (
        Tokens(*(of(t) for t in tensors))  # type: ignore[arg-type]  # only spans may be None
        for of, tensors in (
            (of_queries, (mask.q_positions, mask.q_segments, mask.q_spans)),
            (of_keys, (mask.kv_positions, mask.kv_segments, mask.kv_spans)),
        )
    )
    return mask.allowed(q, kv)

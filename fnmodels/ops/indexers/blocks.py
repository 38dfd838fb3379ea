"""The choice of blocks of keys (MiniMax M3): for each head of keys, the blocks whose keys an indexer scores highest.

A block is `size` neighbouring positions of one document, from a multiple of `size` on. Each head of keys has an index
query, and all share one index key a token; a block's score is the largest q . k of its visible keys. A query attends to
the visible keys of `count` blocks: of the last `local` ones, its own among them, and of those with the largest scores.

A choice is a tensor [B, Q, G count] that names, for each head of keys in turn, blocks by their number in the query's
own document, -1 for none; so it survives packing, padding, permutations and caches. It has no gradient.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnmodels.inputs.values import at_hand
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.slots import Entry

from ..attention.choice import Choice
from ..indexer import Keys, chosen_places, pieces
from ..invariant.attention import dot_products
from ..invariant.rows import rows_are_invariant
from ..linear import linear
from ..mla import Rotate
from ..norm import rms_norm_zero_centered


@dataclass(frozen=True)
class BlockIndexer:
    """Settings. count: blocks of a query, of which the last `local` are always chosen. size: positions of a block.

    eps: of the norms of index queries and keys. rotate: the rotary layout of their first dimensions.
    """

    count: int
    local: int
    size: int
    eps: float
    rotate: Rotate

    def chooses_among(self, keys: int) -> bool:
        """Whether a document of so many keys in a row can have more than `count` blocks."""
        return keys > (self.count - 1) * self.size + 1

    def index(self, weights: Mapping[str, Tensor], x: Tensor, freqs: Tensor) -> Entry:
        """Of tokens x [B, S, D] what a cache holds: `index_keys`."""
        return {"index": index_keys(weights, x, freqs, self)}

    def choose(self, weights: Mapping[str, Tensor], x: Tensor, read: Entry, freqs: Tensor, keys: Keys) -> Tensor:
        """`choose_blocks`. read: `index` of all keys."""
        return choose_blocks(weights, x, read["index"], freqs, keys, self)

    def scores(self, weights: Mapping[str, Tensor], x: Tensor, read: Entry, freqs: Any, keys: Keys) -> "IndexScores":
        """Of single keys for each head of keys: q . k of the queries of x [B, Q, D]. read: `index` of all keys."""
        k = read["index"]
        q = linear(x, weights["q_proj"]).unflatten(-1, (-1, k.shape[-1]))
        q = self.rotate(rms_norm_zero_centered(q, weights["q_norm"], eps=self.eps), freqs)
        products = q.shape[0] * q.shape[2] * k.shape[1]
        return IndexScores(lambda rows: index_products(q[:, rows], k), products, k.shape[-1] ** -0.5)


class Blocks(NamedTuple):
    """The blocks of rows of keys, in the order of documents and positions.

    slots: int64 [B, K], the block of each key. codes: int64 [B, C], ascending, and past all others for no block. span:
    int64 [B, 1], how much the codes of two documents differ at least.
    """

    slots: Tensor
    codes: Tensor
    span: Tensor

    def sums(self, values: Tensor) -> Tensor:
        """[B, ..., C] of values [B, ..., K]: the sum over the keys of each block; bool is counted."""
        values = values.long() if values.dtype == torch.bool else values
        slots = self._slots_of(values)
        return values.new_zeros(*values.shape[:-1], self.codes.shape[1]).scatter_add(-1, slots, values)

    def largest(self, values: Tensor) -> Tensor:
        """[B, ..., C] of values [B, ..., K] that are not negative: the largest of each block's keys."""
        slots = self._slots_of(values)
        return values.new_zeros(*values.shape[:-1], self.codes.shape[1]).scatter_reduce(-1, slots, values, "amax")

    def _slots_of(self, values: Tensor) -> Tensor:
        return self.slots.view(self.slots.shape[0], *[1] * (values.ndim - 2), -1).expand(values.shape)


class IndexScores(NamedTuple):
    """An indexer's scores, with gradients.

    of: fp32 [B, rows, G, K or C] of a slice of the queries, of single keys or of blocks. products: how many one query
    of each row takes, by which queries are taken a few at a time. scale: the factor that makes them logits, with which
    indexers are trained; the choice does not depend on it. blocks: whose scores these are; None: of keys.
    """

    of: Callable[[slice], Tensor]
    products: int
    scale: float
    blocks: Blocks | None = None


def index_keys(weights: Mapping[str, Tensor], x: Tensor, freqs: Tensor, how: BlockIndexer) -> Tensor:
    """The index keys [B, S, d] of x [B, S, D], which a cache holds. freqs: table [B, S, R/2, 2] with R <= d."""
    k = rms_norm_zero_centered(linear(x, weights["k_proj"]), weights["k_norm"], eps=how.eps)
    return how.rotate(k.unsqueeze(-2), freqs).squeeze(-2)


def choose_blocks(
    weights: Mapping[str, Tensor], x: Tensor, k: Tensor, freqs: Tensor, keys: Keys, how: BlockIndexer
) -> Tensor:
    """The choice [B, Q, G count] of the queries of x [B, Q, D]; of each head of keys the best first.

    k: `index_keys` of all keys, [B, K, d]. Of blocks with equal scores the latest is ranked first.
    """
    scored, blocks, parts = how.scores(weights, x, {"index": k}, freqs, keys), blocks_of(keys, how.size), []
    for rows in pieces(x.shape[1], scored.products):
        allowed = keys.allowed(rows).unsqueeze(2)  # [B, Q, 1, K]
        scores = scored.of(rows).masked_fill(~allowed, -torch.inf)
        best = scores.new_full((*scores.shape[:-1], blocks.codes.shape[1]), -torch.inf)
        slots = blocks.slots[:, None, None].expand(scores.shape)
        best = best.scatter_reduce(-1, slots, scores, "amax")
        last = blocks.slots[:, None, None].where(allowed, -1).amax(-1, keepdim=True)
        place = torch.arange(best.shape[-1], device=best.device)
        near = (place <= last) & (place > last - how.local) & (best != -torch.inf)
        parts.append(named_best(best.masked_fill(near, torch.inf), blocks, how.count))
    return torch.cat(parts, dim=1)


def named_best(scores: Tensor, blocks: Blocks, count: int) -> Tensor:
    """int64 [B, Q, G count]: the names of the `count` best blocks of scores [B, Q, G, C]."""
    best, at = scores.flip(-1).sort(dim=-1, descending=True, stable=True)
    best, at = best[..., :count], scores.shape[-1] - 1 - at[..., :count]
    names = (blocks.codes % blocks.span)[:, None, None].expand(scores.shape).gather(-1, at)
    names = names.where(best != -torch.inf, -1)  # NaN is chosen, so that it shows in the result
    missing = count - names.shape[-1]
    return (torch.nn.functional.pad(names, (0, missing), value=-1) if missing > 0 else names).flatten(2)


def index_products(q: Tensor, k: Tensor) -> Tensor:
    """fp32 [B, Q, G, K] of q [B, Q, G, d] and k [B, K, d], by `invariant_rows` in an order of their own."""
    if rows_are_invariant():
        return dot_products(upcast(q).flatten(1, 2), upcast(k)).unflatten(1, q.shape[1:3])
    return (upcast(q).flatten(1, 2) @ upcast(k).transpose(-1, -2)).unflatten(1, q.shape[1:3])


def blocks_of(keys: Keys, size: int) -> Blocks:
    """The blocks of these keys."""
    positions, segments = torch.broadcast_tensors(keys.positions, keys.segments)
    names = positions.clamp(min=0) // size
    span = names.amax(dim=1, keepdim=True) + 1
    codes = segments.clamp(min=0) * span + names
    ordered, order = codes.sort(dim=-1)
    # by all keys, since a graph for slices of one key fewer would not be one for two keys
    new = (ordered != ordered.roll(1, -1)) & (torch.arange(ordered.shape[1], device=ordered.device) > 0)
    slots = torch.empty_like(order).scatter(1, order, new.cumsum(1))
    count = codes.shape[1]
    if (values := at_hand(slots)) is not None:
        count = int(values.max()) + 1 if values.numel() else 0
    none = ((segments.clamp(min=0).amax(dim=1, keepdim=True) + 1) * span).expand(-1, count)
    return Blocks(slots, none.scatter(1, slots, codes), span)


def chosen_blocks(keys: Keys, choices: Tensor, groups: int, size: int) -> Tensor:
    """bool [B, G, Q, K]: the mask of the visible keys in the blocks that choices [B, Q, G k] name."""
    blocks = blocks_of(keys, size)
    rows, queries = choices.shape[:2]
    codes, slots = (t.expand(rows, -1).contiguous() for t in (blocks.codes, blocks.slots))
    wanted = keys.q_segments.clamp(min=0).unsqueeze(-1) * blocks.span.unsqueeze(-1) + choices
    known = (choices >= 0) & (choices < blocks.span.unsqueeze(-1))
    wanted = wanted.where(known, -1).flatten(1)
    at = torch.searchsorted(codes, wanted).clamp(max=codes.shape[1] - 1)
    at = at.where(codes.gather(1, at) == wanted, codes.shape[1]).view(rows, queries, groups, -1).transpose(1, 2)
    taken = torch.zeros(*at.shape[:3], codes.shape[1] + 1, dtype=torch.bool, device=at.device)
    taken = taken.scatter(-1, at, torch.ones_like(at, dtype=torch.bool))
    taken = taken.gather(-1, slots[:, None, None].expand(rows, groups, queries, -1))
    return taken & keys.dense()


def places_in_blocks(keys: Keys, choices: Tensor, groups: int, size: int) -> Choice:
    """`chosen_blocks` as the places of the keys, whose memory is linear in k: a `Choice` for each head of keys."""
    made = [chosen_places(keys, names) for names in _names_of_keys(choices, groups, size)]
    index, seen = (torch.stack([getattr(one, name) for one in made], 1) for name in ("index", "seen"))
    return Choice(index.flatten(0, 1), seen.flatten(0, 1), made[0].keys, groups)


def _names_of_keys(choices: Tensor, groups: int, size: int) -> Iterator[Tensor]:
    """For each head of keys the positions [B, Q, k size] in blocks of choices [B, Q, G k], -1 for none."""
    within = torch.arange(size, device=choices.device)
    for blocks in choices.unflatten(-1, (groups, -1)).unbind(2):
        names = blocks.unsqueeze(-1) * size + within
        yield names.where(blocks.unsqueeze(-1) >= 0, -1).flatten(-2)

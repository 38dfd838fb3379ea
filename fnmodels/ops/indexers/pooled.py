"""The choice of blocks of keys by the means of their index keys (Qwen 3.8 Flash Next): one choice for all heads.

A block is `size` neighbouring positions of one document, from a multiple of `size` on. Its key is the mean of its
tokens' index keys, normed, and rotated for its first position; its score is the sum over heads of relu(q . k). A query
attends to the keys of the `count` complete blocks with the largest scores, and to all of a block that is not complete.

A choice is a tensor [B, Q, count + 2] that names blocks by their number in the query's own document, -1 for none; the
last names are those of the first and the last block that a query sees, where it does not see all of them: a row may
begin in the middle of a document. It has no gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels.ops.dtypes import upcast
from fnmodels.ops.slots import Entry

from ..indexer import Keys, pieces
from ..invariant.rows import pairwise_sum, rows_are_invariant
from ..linear import linear
from ..mla import Rotate
from ..norm import rms_norm_zero_centered
from .blocks import IndexScores, blocks_of, index_products, named_best


@dataclass(frozen=True)
class PooledIndexer:
    """Settings. count: complete blocks of a query. size: positions of a block.

    eps: of the norms of index queries and of the means. rotate: the rotary layout of their first dimensions.
    """

    count: int
    size: int
    eps: float
    rotate: Rotate

    def chooses_among(self, keys: int) -> bool:
        """Whether a document of so many keys in a row can have more than `count` complete blocks."""
        return keys >= (self.count + 1) * self.size

    def index(self, weights: Mapping[str, Tensor], x: Tensor, freqs: Mapping[str, Tensor]) -> Entry:
        """Of tokens x [B, S, D] what a cache holds: index keys, and the table of the first position of their blocks."""
        start = freqs["start"].flatten(2).expand(x.shape[0], -1, -1)
        return {"index": linear(x, weights["k_proj"]), "index_start": start}

    def choose(
        self, weights: Mapping[str, Tensor], x: Tensor, read: Entry, freqs: Mapping[str, Tensor], keys: Keys
    ) -> Tensor:
        """The choice [B, Q, count + 2] of the queries of x [B, Q, D], the best first. read: `index` of all keys."""
        return named_pools(self.scores(weights, x, read, freqs, keys), keys, self.count, self.size)

    def scores(
        self, weights: Mapping[str, Tensor], x: Tensor, read: Entry, freqs: Mapping[str, Tensor], keys: Keys
    ) -> IndexScores:
        """The scores of the queries of x [B, Q, D]; of blocks that are not complete, any. read: `index` of all keys."""
        q = linear(x, weights["q_proj"]).unflatten(-1, (-1, read["index"].shape[-1]))
        q = self.rotate(rms_norm_zero_centered(q, weights["q_scale"], eps=self.eps), freqs["table"])
        blocks = blocks_of(keys, self.size)
        k = self._means(weights, read, blocks.slots.expand(x.shape[0], -1), blocks.codes.shape[1])

        def of(rows: slice) -> Tensor:
            products = index_products(q[:, rows], k).relu()
            return (pairwise_sum(products, -2) if rows_are_invariant() else products.sum(-2)).unsqueeze(2)

        return IndexScores(of, q.shape[0] * q.shape[2] * k.shape[1], k.shape[-1] ** -0.5, blocks)

    def _means(self, weights: Mapping[str, Tensor], read: Entry, slots: Tensor, count: int) -> Tensor:
        """The keys [B, C, d] of the blocks; of those that are not complete, which nothing reads, any numbers."""
        tokens, start = read["index"], read["index_start"]

        def in_blocks(of_tokens: Tensor) -> tuple[Tensor, Tensor]:
            at = slots.unsqueeze(-1).expand_as(of_tokens)
            return of_tokens.new_zeros(slots.shape[0], count, of_tokens.shape[-1]), at

        empty, at = in_blocks(upcast(tokens))
        means = (empty.scatter_add(1, at, upcast(tokens)) / self.size).to(tokens.dtype)
        empty, at = in_blocks(start)
        tables = empty.scatter(1, at, start).unflatten(-1, (-1, 2))  # equal for all tokens of a block
        k = rms_norm_zero_centered(means, weights["k_scale"], eps=self.eps)
        return self.rotate(k.unsqueeze(-2), tables).squeeze(-2)


def named_pools(scored: IndexScores, keys: Keys, count: int, size: int) -> Tensor:
    """The choice [B, Q, count + 2] by the scores of blocks, which all heads share."""
    blocks, parts = scored.blocks, []
    assert blocks is not None
    for rows in pieces(keys.q_segments.shape[1], scored.products):
        found, allowed = scored.of(rows).squeeze(2), keys.allowed(rows)
        allowed = allowed.expand(found.shape[0], -1, -1)
        slots, seen = blocks.slots.expand(found.shape[0], -1).unsqueeze(1), blocks.sums(allowed)
        best = named_best(found.masked_fill(seen < size, -torch.inf).unsqueeze(2), blocks, count)
        names = (blocks.codes % blocks.span).expand(found.shape[0], -1).unsqueeze(1).expand_as(seen)
        ends = [slots.where(allowed, -1).amax(-1), slots.where(allowed, seen.shape[-1]).amin(-1)]
        at = torch.stack(ends, -1)
        inside = at.clamp(0, seen.shape[-1] - 1)
        partly = (at == inside) & (seen.gather(-1, inside) < size) & (seen.gather(-1, inside) > 0)
        partly[..., 1] &= at[..., 1] != at[..., 0]
        parts.append(torch.cat((best, names.gather(-1, inside).where(partly, -1)), -1))
    return torch.cat(parts, dim=1)

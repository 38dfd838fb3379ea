"""The choice of blocks of keys by pools of their index keys (GLM 5.3 Flash): one choice for all heads.

A block is `size` neighbouring positions of one document, from a multiple of `size` on. Its key is the sum of its
tokens' index keys, each channel weighted by a softmax over the block of what the tokens say of it and a bias of the
place; its score is that of a lightning indexer (`fnmodels.ops.indexer`). The choice is that of `pooled`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.ops.dtypes import upcast
from fnmodels.ops.slots import Entry

from ..indexer import Indexer, Keys, index_keys, index_queries, index_scores
from ..invariant.rows import elementwise
from ..linear import linear
from .blocks import IndexScores, blocks_of
from .pooled import named_pools


@dataclass(frozen=True)
class GatedPoolIndexer:
    """Settings. count: complete blocks of a query. size: positions of a block. norm_eps: of the keys' LayerNorm."""

    count: int
    size: int
    norm_eps: float = 1e-6

    @property
    def of_keys(self) -> Indexer:
        """The settings by which single keys are made and scored; nothing rotates."""
        return Indexer(self.count, lambda x, freqs: x, self.norm_eps)

    def chooses_among(self, keys: int) -> bool:
        """Whether a document of so many keys in a row can have more than `count` complete blocks."""
        return keys >= (self.count + 1) * self.size

    def index(self, weights: Mapping[str, Tensor], x: tuple[Tensor, Tensor], freqs: Any) -> Entry:
        """Of tokens x what a cache holds: index keys, and what they say of the weights of their channels.

        x: [B, S, D], and what queries are projected from, [B, S, rank].
        """
        return {
            "index": index_keys(weights, x[0], freqs, self.of_keys),
            "index_gate": linear(x[0], weights["pool_gate"]),
        }

    def choose(
        self, weights: Mapping[str, Tensor], x: tuple[Tensor, Tensor], read: Entry, freqs: Any, keys: Keys
    ) -> Tensor:
        """The choice [B, Q, count + 2] of the queries of x, the best first. read: `index` of all keys."""
        return named_pools(self.scores(weights, x, read, freqs, keys), keys, self.count, self.size)

    def scores(
        self, weights: Mapping[str, Tensor], x: tuple[Tensor, Tensor], read: Entry, freqs: Any, keys: Keys
    ) -> IndexScores:
        """The scores of the queries of x; of blocks that are not complete, any. read: `index` of all keys."""
        q, share = index_queries(weights, *x, read["index"].shape[-1], freqs, self.of_keys)
        blocks = blocks_of(keys, self.size)
        slots = blocks.slots.expand(q.shape[0], -1)
        places = keys.positions.clamp(min=0) % self.size
        gates = upcast(read["index_gate"]) + upcast(weights["pool_bias"])[places]
        k = _pooled(read["index"], gates, slots, blocks.codes.shape[1])

        def of(rows: slice) -> Tensor:
            return index_scores(q[:, rows], share[:, rows], k).unsqueeze(2)

        return IndexScores(of, q.shape[0] * q.shape[2] * k.shape[1], 1.0, blocks)


def _pooled(k: Tensor, gates: Tensor, slots: Tensor, count: int) -> Tensor:
    """The keys [B, C, d] of `count` blocks of k [B, K, d], by the softmax of gates [B, K, d] over each block.

    Weights and keys are rounded to the dtype of k, as in the reference.
    """
    at = slots.unsqueeze(-1).expand_as(k)
    empty = gates.new_zeros(k.shape[0], count, k.shape[-1])
    most = torch.full_like(empty, -torch.inf).scatter_reduce(1, at, gates, "amax")
    shares = elementwise(torch.exp, gates - most.gather(1, at))
    shares = (shares / empty.scatter_add(1, at, shares).gather(1, at)).to(k.dtype)
    return empty.scatter_add(1, at, upcast(shares * k)).to(k.dtype)

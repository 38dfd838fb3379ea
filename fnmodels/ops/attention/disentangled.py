"""Disentangled attention (DeBERTa, arXiv 2006.03654): what a score gets from the distance of query and key.

That is the product of the query with an embedding of the distance, and of the key with another one of it; both
embeddings are projected like keys and queries of tokens. Distances come from positions, never from indices.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.ops.qkv import project_qkv


def rows_of_distances(span: int, most: int, *, logarithmic: bool) -> list[int]:
    """The row of the table [2 span, D] of each distance query - key from -most to most; longer ones have the ends'.

    logarithmic: distances beyond span / 2 share rows, more and more of them up to `most`; else each has its own.
    """
    middle = span // 2

    def bucket(length: int) -> int:
        if not logarithmic or length <= middle:
            return length
        share = math.log(length / middle) / math.log((most - 1) / middle)
        return math.ceil(share * (middle - 1)) + middle

    signed = (bucket(abs(d)) * (1 if d > 0 else -1) for d in range(-most, most + 1))
    return [min(max(row + span, 0), 2 * span - 1) for row in signed]


@tree.pytree
@dataclass(frozen=True)
class DistanceEmbeddings:
    """The table [R, D] of all layers, the row of each distance as in `DisentangledBias`, and positions of queries
    [B or 1, Q] and keys [B or 1, K]."""

    table: Tensor
    rows: Tensor
    q_positions: Tensor
    kv_positions: Tensor

    def of_layer(self, weights: Mapping[str, Tensor], q: Tensor, k: Tensor, *, scale: float) -> "DisentangledBias":
        """The bias of a layer's scores of q [B, Q, N, H] and k [B, K, N, H], by its projections of both."""
        queries, keys, _ = (t[0] for t in project_qkv(weights, self.table[None], head_dim=q.shape[-1]))  # [R, N, H]
        by_query = torch.einsum("bqnh,rnh->bqnr", q, keys) * scale
        by_key = torch.einsum("bknh,rnh->bknr", k, queries) * scale
        return DisentangledBias(self.rows, (self.q_positions, by_query), (self.kv_positions, by_key))


@tree.pytree
@dataclass(frozen=True)
class DisentangledBias:
    """A bias of scores by distance, query and key; like `RelativeBias`, for the same kernels.

    rows [2 D + 1]: of each distance query - key from -D to D. queries, keys: (positions [B or 1, S], the products
    [B, S, N, R] of each token with all rows); keys may be positions alone, and then add nothing.
    """

    rows: Tensor
    queries: tuple[Tensor, ...]
    keys: tuple[Tensor, ...]

    def of(self, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]) -> "DisentangledBias":
        """The same for other queries and keys."""
        return DisentangledBias(self.rows, queries, keys)

    def dense(self) -> Tensor:
        """[B, N, Q, K]."""
        (q_at, by_query), (k_at, *by_keys) = self.queries, self.keys
        most = len(self.rows) // 2
        distance = (q_at[:, :, None] - k_at[:, None, :]).clamp(-most, most) + most
        row = self.rows[distance][:, None]  # [B or 1, 1, Q, K]
        heads = by_query.shape[2]
        row = row.expand(by_query.shape[0], heads, -1, -1)
        from_query = by_query.transpose(1, 2).gather(-1, row)
        for by_key in by_keys:
            from_query = from_query + by_key.transpose(1, 2).gather(-1, row.mT).mT
        return from_query

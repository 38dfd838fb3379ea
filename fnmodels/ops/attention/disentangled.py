"""Disentangled attention (DeBERTa, arXiv 2006.03654): what a score gets from the distance of query and key.

That is the product of the query with an embedding of the distance, and of the key with another one of it; both
embeddings are projected like keys and queries of tokens. Distances come from positions, never from indices.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.noise import document_keys, fold
from fnmodels.inputs.values import constants, host_reads, readable, unwrapped
from fnmodels.ops.dropout import Noise, dropped_table
from fnmodels.ops.linear import linear
from fnmodels.ops.qkv import project_qkv, split_heads


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
    """The tables of all layers, the row of each distance as in `DisentangledBias`, and positions of queries [B or 1, Q]
    and keys [B or 1, K].

    table: [R, D]; or [B, U, R, D], of U documents of each row. keys: int64 [B, U], from which the tables of documents
    are dropped. places: int64 [B, S], which of the U each token is of; None: of the only one, or U is S and each token
    has its own.
    """

    table: Tensor
    rows: Tensor
    q_positions: Tensor
    kv_positions: Tensor
    keys: Tensor | None = None
    places: Tensor | None = None

    def with_noise(self, keys: Tensor, valid: Tensor | None) -> "DistanceEmbeddings":
        """The same with the keys of the documents of tokens that have these keys of noise [B, S].

        Transformers drops one table in each layer for all rows of its batch; here a document has a table of its own,
        from the key that its tokens share, so that its mask is the same however it is packed. Of one document the
        distribution is the same. Code that is compiled, and vmap over the keys, cannot count documents, and gives each
        token its document's table: S times the memory, but with a layout of one document per row.
        """
        own = document_keys(keys, self.q_positions)
        if valid is not None:  # padding is of one of the documents
            own = own.where(valid, own.where(valid, 0).amax(1, keepdim=True))
        if not (host_reads() and readable(own)):
            return replace(self, keys=own)
        ordered, order = own.sort(1)
        place = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
        place = torch.cat((torch.zeros_like(order[:, :1]), place), 1)
        count = int(unwrapped(place).max()) + 1
        each = own.new_zeros(len(own), count).scatter(1, place, ordered)
        return replace(self, keys=each, places=torch.zeros_like(order).scatter(1, order, place))

    def dropped(self, noise: Noise, rate: float, layout: Layout | None) -> "DistanceEmbeddings":
        """The same with the tables of one layer, dropped at this rate, where it has keys of documents."""
        if self.keys is None:
            return self
        keys = self.keys
        if self.places is None and layout is not None and all(len(row) <= 1 for row in layout.rows):
            firsts = [row[0][0] if row else 0 for row in layout.rows]
            keys = keys.gather(1, constants(firsts, torch.int64, keys.device)[:, None])
        table = dropped_table(self.table, fold(keys, noise.layer), rate, "distances")
        return replace(self, table=table, keys=keys)

    def of_layer(self, weights: Mapping[str, Tensor], q: Tensor, k: Tensor, *, scale: float) -> "DisentangledBias":
        """The bias of a layer's scores of q [B, Q, N, H] and k [B, K, N, H], by its projections of both: those of
        tokens, unless it has its own for distances."""
        tables = self.table if self.table.ndim == 4 else self.table[None, None]
        rows = _projected(weights, tables.flatten(0, 1), q.shape[-1])
        queries, keys = (t.unflatten(0, tables.shape[:2]) for t in rows)  # [B or 1, U, R, N, H]
        by_query, by_key = self._products(q, keys) * scale, self._products(k, queries) * scale
        return DisentangledBias(self.rows, (self.q_positions, by_query), (self.kv_positions, by_key))

    def _products(self, x: Tensor, of: Tensor) -> Tensor:
        """x [B, S, N, H] with all rows of its document's table, of [B or 1, U, R, N, H]: [B, S, N, R]."""
        count = of.shape[1]
        if self.keys is None:
            return torch.einsum("bsnh,rnh->bsnr", x, of[0, 0])
        if count > 1 and self.places is None:
            return torch.einsum("bsnh,bsrnh->bsnr", x, of)
        found = torch.einsum("bsnh,brnh->bsnr", x, of[:, 0])
        for place in range(1, count):
            assert self.places is not None
            more = torch.einsum("bsnh,brnh->bsnr", x, of[:, place])
            found = more.where(self.places[:, :, None, None] == place, found)
        return found


def _projected(weights: Mapping[str, Tensor], table: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Queries and keys [U, R, N, H] of distances, of a table [U, R, D]."""
    if "distance_q_proj" not in weights:
        return project_qkv(weights, table, head_dim=head_dim)[:2]
    queries = linear(table, weights["distance_q_proj"], weights["distance_q_bias"])
    return split_heads(queries, head_dim), split_heads(linear(table, weights["distance_k_proj"]), head_dim)


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

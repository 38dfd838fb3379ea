"""`RelativeBias`: what a head adds to a score, by the distance of key and query (T5, arXiv 1910.10683, section 2.1).

Distances come from positions, which are tensors of the batch, and never from indices: a row may be packed, padded or
permuted. The table has a value for each bucket of distances and each head; all layers of a stack share it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.values import constants


def buckets(count: int, max_distance: int, *, bidirectional: bool) -> list[int]:
    """The bucket of each distance key - query from -max_distance to max_distance; those beyond have that of the ends.

    bidirectional: half of the `count` buckets are for keys after the query; else all keys after it share bucket 0.
    Of the buckets of one direction the first half hold one distance each, the others grow with its logarithm.
    """
    per_direction = count // 2 if bidirectional else count
    exact = per_direction // 2

    def of(length: int) -> int:
        if length < exact:
            return length
        # A power lies on a boundary exactly, and belongs to the bucket that begins there.
        share = math.log(length / exact) / math.log(max_distance / exact)
        return min(exact + int(share * (per_direction - exact) + 1e-9), per_direction - 1)

    behind = [of(length) for length in range(max_distance, -1, -1)]
    ahead = [per_direction + of(length) if bidirectional else 0 for length in range(1, max_distance + 1)]
    return behind + ahead


def by_distance(table: Tensor, max_distance: int, *, bidirectional: bool) -> Tensor:
    """[2 max_distance + 1, N]: the row of `table` [buckets, N] for each distance from -max_distance to max_distance."""
    bucket_numbers = buckets(table.shape[0], max_distance, bidirectional=bidirectional)
    return table[constants(bucket_numbers, torch.int64, table.device)]


class Bias(Protocol):
    """A tensor that a kernel adds to scores: `RelativeBias`, `GatedBias`, `DistanceBias`, or
    `disentangled.DisentangledBias`.

    queries, keys: what it reads of them, tensors [B or 1, S, ...], which may be pieces of a row.
    """

    @property
    def queries(self) -> tuple[Tensor, ...]: ...
    @property
    def keys(self) -> tuple[Tensor, ...]: ...

    def of(self, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]) -> Self: ...
    def dense(self) -> Tensor: ...


@tree.pytree
@dataclass(frozen=True)
class RelativeBias:
    """A bias added to the scores of queries [B or 1, Q] and keys [B or 1, K], by their positions.

    values [2 D + 1, N]: for each head and distance key - query from -D to D, see `by_distance`; longer distances have
    the value of D.
    """

    values: Tensor
    q_positions: Tensor
    kv_positions: Tensor

    def dense(self) -> Tensor:
        """[B or 1, N, Q, K]."""
        most = self.values.shape[0] // 2
        distance = (self.kv_positions[:, None, :] - self.q_positions[:, :, None]).clamp(-most, most) + most
        values = self.values.mT.contiguous().index_select(1, distance.flatten())
        return values.unflatten(1, distance.shape).transpose(0, 1)

    @property
    def queries(self) -> tuple[Tensor, ...]:
        """The tensors [B or 1, Q, ...] of queries that the bias reads."""
        return (self.q_positions,)

    @property
    def keys(self) -> tuple[Tensor, ...]:
        """The tensors [B or 1, K, ...] of keys that the bias reads."""
        return (self.kv_positions,)

    def of(self, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]) -> "RelativeBias":
        """The same for other queries and keys."""
        return RelativeBias(self.values, *queries, *keys)


@tree.pytree
@dataclass(frozen=True)
class GatedBias:
    """A `RelativeBias` that each head of each query multiplies by a gate [B, Q, N] (WavLM, arXiv 2110.13900)."""

    bias: RelativeBias
    gates: Tensor

    def dense(self) -> Tensor:
        """[B, N, Q, K]."""
        return self.gates.mT[..., None] * self.bias.dense()

    @property
    def queries(self) -> tuple[Tensor, ...]:
        """The tensors [B or 1, Q, ...] of queries that the bias reads."""
        return (*self.bias.queries, self.gates)

    @property
    def keys(self) -> tuple[Tensor, ...]:
        """The tensors [B or 1, K, ...] of keys that the bias reads."""
        return self.bias.keys

    def of(self, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]) -> "GatedBias":
        """The same for other queries and keys."""
        return GatedBias(self.bias.of(queries[:1], keys), queries[1])


@tree.pytree
@dataclass(frozen=True)
class DistanceBias:
    """A bias that every query has of its own for each distance query - key from 0 to E - 1, and 0 for longer ones.

    values: [B, Q, N, E]. q_positions, kv_positions: [B or 1, Q] and [B or 1, K], of any dtype that holds them exactly.
    """

    values: Tensor
    q_positions: Tensor
    kv_positions: Tensor

    def dense(self) -> Tensor:
        """[B, N, Q, K]."""
        values = self.values.transpose(1, 2)
        distance = (self.q_positions[:, :, None] - self.kv_positions[:, None, :]).long()[:, None]
        near = (distance >= 0) & (distance < values.shape[-1])
        at = distance.where(near, 0).expand(*values.shape[:2], -1, -1)
        return values.gather(-1, at).where(near, 0)

    @property
    def queries(self) -> tuple[Tensor, ...]:
        """The tensors [B or 1, Q, ...] of queries that the bias reads."""
        return self.q_positions, self.values

    @property
    def keys(self) -> tuple[Tensor, ...]:
        """The tensors [B or 1, K, ...] of keys that the bias reads."""
        return (self.kv_positions,)

    def of(self, queries: tuple[Tensor, ...], keys: tuple[Tensor, ...]) -> "DistanceBias":
        """The same for other queries and keys."""
        return DistanceBias(queries[1], queries[0], *keys)


def kept_places(bias: Bias | None) -> dict[str, Tensor]:
    """{"places": [B, K, 1]} that a cache keeps of the new keys of a `DistanceBias`; {} for another bias or None."""
    return {"places": bias.kv_positions[..., None]} if isinstance(bias, DistanceBias) else {}


def with_places(bias: Bias | None, read: Mapping[str, Tensor]) -> Bias | None:
    """The bias of all keys that a cache has returned with their places; another bias or None as it is."""
    return bias.of(bias.queries, (read["places"][..., 0],)) if isinstance(bias, DistanceBias) else bias

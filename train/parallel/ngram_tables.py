"""Tables of n-grams over fsdp and tp, which hold shards of them, read them where they are, and never gather them.

Published tables have billions of elements and odd numbers of rows, so ranges of rows may differ in size.

Over fsdp a rank holds a range of rows. It asks the ranks that hold them for the rows of its ids, each once, and the sum
of the gradients of equal ids travels back: two messages of a row for each unique id in place of the table.

Over tp, whose ranks have the same tokens, a rank holds a range of rows, as of a vocabulary. It reads those of the ids
that lie in its range, and the sum over ranks has the rows of all. Then fsdp shards columns: the unique ids of all ranks
come to each rank, which sends its columns of the rows that they name to the rank whose ids they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.values import has_values, host_is_away
from params.sharding import Sharding
from train.comm.collectives import all_gather, all_to_all, enter, exchange, maximum, reduce_scatter
from train.comm.region import Region
from train.losses.vocab_parallel import are_outside
from train.optim.base import wide_dtype

from .mesh import DATA

_OUTSIDE, _IN_LAYER = "ngrams.tables.", ".ngrams.table"  # of the paths of tables: the begin, or the end


@dataclass(frozen=True, eq=False)
class ShardedTable:
    """weight: this rank's rows, or columns, of a table [rows, d], for F.embedding.

    how: the table's sharding. seen: the dtype in which the model sees its rows.
    """

    weight: Any
    how: Sharding
    seen: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full table, [rows, d]."""
        return self.how.shape

    def shared(self, region: Region) -> ShardedTable:
        """The table for ids that differ over the region's ranks, all of which hold this shard."""
        return replace(self, weight=region.shared(self.weight))

    def to(self, dtype: torch.dtype) -> ShardedTable:
        """The table whose rows have another dtype, for a loss that casts its params."""
        return replace(self, seen=dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """F.embedding(ids, self); other functions raise torch's error."""
        return args[1].look_up(args[0]) if func is F.embedding and isinstance(args[1], cls) else NotImplemented

    def look_up(self, ids: Tensor) -> Tensor:
        """The rows [B, S, ..., d] of this rank's ids [B, S, ...]. IndexError for an id out of range on some rank."""
        mesh: Any = self.how.mesh
        name, dim = reading(self.how)
        group = mesh.get_group(name)
        read = self._by_rows if dim == 0 else self._by_columns
        if torch.compiler.is_compiling() or host_is_away() or not has_values(ids):  # no shape depends on values
            return (self._by_rows_of_all if dim == 0 else read)(ids, group).to(self.seen)
        unique, places = torch.unique(ids, return_inverse=True)
        return read(unique, group)[places].to(self.seen)

    def _by_columns(self, ids: Tensor, group: Any) -> Tensor:
        """Rows of `ids`, of which every rank may have another number where they are [n]."""
        count = len(ids)
        if ids.ndim == 1:
            most = int(maximum(torch.tensor(count, device=ids.device), group))
            ids = torch.cat((ids, ids.new_zeros(most - count)))
        rows = F.embedding(all_gather(ids[None], 0, group), self.weight)
        mine: Tensor = all_to_all(rows, group, split=0, join=-1)[0]
        return mine[:count]

    def _by_rows(self, ids: Tensor, group: Any) -> Tensor:
        """Rows of ids [n], which increase, from the ranks that hold them."""
        size, rank, each = dist.get_world_size(group), dist.get_rank(group), self._rows_of_a_rank(group)
        if wrong := bool(are_outside(ids, self.shape[0])):  # on any rank, so that none waits for another
            ids = ids[:0]
        counts = torch.bincount(ids // each, minlength=size)
        counts = torch.cat((counts, counts.new_tensor([wrong])))
        *every, faults = all_gather(counts[None], 0, group).t().tolist()
        if any(faults):
            raise IndexError("index out of range")
        sent, received = [asked[rank] for asked in every], every[rank]
        asked = exchange(ids % each, sent, received, group)
        return exchange(F.embedding(asked, self.weight), received, sent, group)

    def _by_rows_of_all(self, ids: Tensor, group: Any) -> Tensor:
        """Rows of ids [B, S, ...]: the sum over ranks of the rows that they hold of the ids of all."""
        every, each = all_gather(ids[None], 0, group), self._rows_of_a_rank(group)
        own = every // each == dist.get_rank(group)
        rows = F.embedding((every % each).where(own, 0), self.weight).where(own[..., None], 0)
        mine: Tensor = reduce_scatter(rows, 0, group)[0]
        return mine

    def _rows_of_a_rank(self, group: Any) -> int:
        return -(-self.shape[0] // dist.get_world_size(group))


def sharded_table(local: Tensor, how: Sharding, seen: torch.dtype) -> ShardedTable:
    """The table of this rank's shard, whose gradient is the sum over all ranks with tokens of their own."""
    mesh: Any = how.mesh
    shard = local.view_as(local)  # no leaf, so that hooks on it end with the call
    shard = shard.to(wide_dtype(local.dtype)) if local.requires_grad else shard  # sums in fp32 at least
    for name in replicated(how):
        shard = enter(shard, mesh.get_group(name))
    return ShardedTable(shard, how, seen)


def reading(how: Sharding) -> tuple[str, int]:
    """The mesh dimension, of ranks with tokens of their own, that shards a table, and what of it; ("", -1): none."""
    parts = zip(how.sizes, how.dims, strict=True)
    return next(((n, dim) for (n, size), dim in parts if size > 1 and dim is not None and n in DATA), ("", -1))


def replicated(how: Sharding) -> list[str]:
    """The mesh dimensions whose ranks have tokens of their own and the same shard."""
    return [n for (n, size), dim in zip(how.sizes, how.dims, strict=True) if size > 1 and dim is None and n in DATA]


def is_table(path: str) -> bool:
    """Whether the parameter is a table of n-grams."""
    return path.startswith(_OUTSIDE) or path.endswith(_IN_LAYER)


def is_sharded_table(path: str, how: Sharding) -> bool:
    """Whether the parameter is a table of n-grams that ranks with tokens of their own shard."""
    return is_table(path) and reading(how)[1] >= 0


@dataclass(frozen=True, eq=False)
class TableRows:
    """weight [rows of this rank, d]: a tensor or a `ShardedTable`, a range of the rows of a table.

    rows: those of the full table. of_all: the ids that are looked up are those of all positions on each rank, also
    where the region shards the sequence.
    """

    weight: Any
    region: Region
    rows: int
    of_all: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full table."""
        return (self.rows, *self.weight.shape[1:])

    def to(self, dtype: torch.dtype) -> TableRows:
        """The table with rows of another dtype."""
        return replace(self, weight=self.weight.to(dtype))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """F.embedding(ids, self); other functions raise torch's error."""
        return args[1].look_up(args[0]) if func is F.embedding and isinstance(args[1], cls) else NotImplemented

    def look_up(self, ids: Tensor) -> Tensor:
        """The rows [B, S, ..., d] of ids [B, S, ...]. IndexError for an id out of range."""
        if are_outside(ids, self.rows):
            raise IndexError("index out of range")
        region = self.region if not self.of_all else replace(self.region, sequence=False)
        every = region.join(ids)
        each = -(-self.rows // region.size)
        low, high = region.rank * each, min(region.rank * each + each, self.rows)
        own = (every >= low) & (every < high)
        found = F.embedding((every - low).where(own, 0), self.weight)
        return region.leave(found.where(own[..., None], 0))

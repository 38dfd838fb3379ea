"""The parameters of one pipeline rank, as `params.plan` shards them: what it holds, and what it computes with."""

import dataclasses
import functools
import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch

from fnmodels.models.common.spec import Leaf
from params.axes import EMBED, EXPERT, HEADS, regions_of
from params.sharding import Sharding
from train.parallel.mesh import DATA, Mesh


@dataclass(frozen=True)
class LocalLeaf:
    """One leaf on one rank. path: within its layer, or that of a leaf outside of layers."""

    path: str
    spec: Leaf
    sharding: Sharding
    mesh: Mesh
    dtype: torch.dtype

    @functools.cached_property
    def local(self) -> int:
        """Elements that the rank holds."""
        return math.prod(self.sharding.local_shape)

    @functools.cached_property
    def whole(self) -> int:
        """Elements that it computes with: gathered over all mesh dimensions that shard it but tp and ep."""
        return math.prod(gathered_shape(self.sharding))

    def sharded_dim(self, name: str) -> int | None:
        """The dimension of the leaf that this mesh dimension shards, or None."""
        return dict(zip(self.mesh.sizes, self.sharding.dims, strict=True))[name]

    @property
    def compute(self) -> torch.dtype:
        """The dtype in which it is used; leaves that are not trainable (a router's bias) keep their own."""
        return self.dtype if self.spec.trainable else self.spec.dtype

    @functools.cached_property
    def shared(self) -> bool:
        """Whether it is replicated over tp and used inside a sublayer, by each rank for its own heads or widths."""
        axes, dim = self.spec.axes, self.sharded_dim("tp")
        inside = EXPERT in axes or (axes[0] != EMBED and HEADS in regions_of(axes))
        return self.spec.trainable and dim is None and inside

    @functools.cached_property
    def used(self) -> int:
        """Bytes of a gathered or cast copy; 0 if the parameter itself is used."""
        same = self.whole == self.local and self.compute == self.spec.dtype
        return 0 if same else self.whole * self.compute.itemsize


def gathered_shape(sharding: Sharding) -> tuple[int, ...]:
    """The shape that a rank computes with: sharded by tp and ep alone."""
    places = zip(sharding.sizes, sharding.dims, strict=True)
    kept = tuple(dim if name in ("tp", "ep") else None for (name, _), dim in places)
    return dataclasses.replace(sharding, dims=kept).local_shape


def gathered_bytes(group: Iterable[LocalLeaf], kept: Container[str] | None = None) -> int:
    """Bytes of gathered or cast copies: of all leaves, or of those at `kept` paths."""
    return sum(leaf.used for leaf in group if kept is None or leaf.path in kept)


@dataclass(frozen=True)
class Transfer:
    """The communication of leaves. dtype: in use. replicated, gathered: over these mesh dimensions."""

    dtype: torch.dtype
    trainable: bool
    replicated: tuple[str, ...]
    gathered: tuple[str, ...]


def transfers(group: Iterable[LocalLeaf]) -> list[tuple[Transfer, int]]:
    """The transfers of a group of leaves, and how many local elements each has."""
    found: dict[Transfer, int] = {}
    for leaf in group:
        dims = [(n, dim) for (n, size), dim in zip(leaf.sharding.sizes, leaf.sharding.dims, strict=True) if size > 1]
        replicated = tuple(name for name, dim in dims if dim is None and name in DATA)
        gathered = tuple(name for name, dim in dims if dim is not None and name in DATA and name != "ep")
        transfer = Transfer(leaf.compute, leaf.spec.trainable, replicated, gathered)
        found[transfer] = found.get(transfer, 0) + leaf.local
    return list(found.items())

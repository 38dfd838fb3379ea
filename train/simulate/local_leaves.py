"""The leaves of one place in the pipeline, as `params.plan` cuts them: what a rank holds, and what it computes with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Container, Iterable
from dataclasses import dataclass

import torch

from fnmodels.models.common.spec import Leaf
from params.sharding import Sharding
from train.parallel.mesh import DATA, Mesh


@dataclass(frozen=True)
class Piece:
    """One leaf on one rank. path: within its layer, or that of a leaf outside of layers."""

    path: str
    leaf: Leaf
    sharding: Sharding
    mesh: Mesh
    dtype: torch.dtype

    @property
    def local(self) -> int:
        """Numbers that the rank holds."""
        return math.prod(self.sharding.local_shape)

    @property
    def whole(self) -> int:
        """Numbers that it computes with: gathered over what divides it, but tp and ep."""
        return math.prod(gathered_shape(self.sharding))

    def place(self, name: str) -> int | None:
        """The dimension that this one of the mesh divides."""
        return dict(zip(self.mesh.sizes, self.sharding.dims, strict=True))[name]

    @property
    def compute(self) -> torch.dtype:
        """What does not learn (a router's bias) keeps its own."""
        return self.dtype if self.leaf.trainable else self.leaf.dtype

    @property
    def shared(self) -> bool:
        """Whether all ranks of tp hold it and use it between a sublayer's ends, each for its own heads or columns."""
        axes, place = self.leaf.axes, self.place("tp")
        inside = "expert" in axes or (axes[0] != "embed" and {"heads", "kv_heads", "latent", "head_dim"} & set(axes))
        return self.leaf.trainable and place is None and bool(inside)

    @property
    def used(self) -> int:
        """Bytes of a gathered or cast copy; 0 where the parameter itself is used."""
        same = self.whole == self.local and self.compute == self.leaf.dtype
        return 0 if same else self.whole * self.compute.itemsize


def gathered_shape(sharding: Sharding) -> tuple[int, ...]:
    """The shape of what a rank computes with: without what fsdp divides."""
    places = zip(sharding.sizes, sharding.dims, strict=True)
    kept = tuple(dim if name in ("tp", "ep") else None for (name, _), dim in places)
    return dataclasses.replace(sharding, dims=kept).local_shape


def gathered_bytes(group: Iterable[Piece], kept: Container[str] | None = None) -> int:
    """Of the copies in which leaves are gathered or cast: of all, or of those at `kept` paths."""
    return sum(piece.used for piece in group if kept is None or piece.path in kept)


@dataclass(frozen=True)
class Way:
    """dtype: in which leaves are used. learns: whether they do. copied, gathered: over these dimensions of the mesh."""

    dtype: torch.dtype
    learns: bool
    copied: tuple[str, ...]
    gathered: tuple[str, ...]


def ways(group: Iterable[Piece]) -> list[tuple[Way, int]]:
    """How the leaves of a group travel, those of one way together, and how many numbers of theirs the rank has."""
    found: dict[Way, int] = {}
    for piece in group:
        dims = [(n, dim) for (n, size), dim in zip(piece.sharding.sizes, piece.sharding.dims, strict=True) if size > 1]
        copied = tuple(name for name, dim in dims if dim is None and name in DATA)
        gathered = tuple(name for name, dim in dims if dim is not None and name in DATA and name != "ep")
        way = Way(piece.compute, piece.leaf.trainable, copied, gathered)
        found[way] = found.get(way, 0) + piece.local
    return list(found.items())

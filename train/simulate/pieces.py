"""The leaves of one place in the pipeline, as `params.plan` cuts them: what a rank holds, and what it computes with."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fnmodels.leaf import Leaf
from params.sharding import Sharding
from train.parallel.mesh import DATA, Mesh


@dataclass(frozen=True)
class Piece:
    """One leaf on one rank."""

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

    @property
    def compute(self) -> torch.dtype:
        """What does not learn (a router's bias) keeps its own."""
        return self.dtype if self.leaf.trainable else self.leaf.dtype

    @property
    def shared(self) -> bool:
        """Whether all ranks of tp hold it and use it between a sublayer's ends, each for its own heads or columns."""
        axes, place = self.leaf.axes, dict(zip(self.mesh.sizes, self.sharding.dims, strict=True))["tp"]
        inside = "expert" in axes or (axes[0] != "embed" and {"heads", "kv_heads", "latent", "head_dim"} & set(axes))
        return self.leaf.trainable and place is None and bool(inside)

    @property
    def used(self) -> int:
        """Bytes of a gathered or cast copy; 0 where the parameter itself is used."""
        same = self.whole == self.local and self.compute == self.leaf.dtype
        return 0 if same else self.whole * self.compute.itemsize


def gathered_shape(sharding: Sharding) -> tuple[int, ...]:
    """The shape of what a rank computes with."""
    places = zip(sharding.sizes, sharding.dims, strict=True)
    kept = tuple(dim if name in ("tp", "ep") else None for (name, _), dim in places)
    return dataclasses.replace(sharding, dims=kept).local_shape


def ways(group: Sequence[Piece]) -> Iterable[tuple[int, int, bool, tuple[str, ...], tuple[str, ...]]]:
    """(numbers, bytes of one, do they learn, dimensions that hold copies, that divide) of what travels together."""
    found: dict[Any, int] = {}
    for piece in group:
        dims = [(n, dim) for (n, size), dim in zip(piece.sharding.sizes, piece.sharding.dims, strict=True) if size > 1]
        copied = tuple(name for name, dim in dims if dim is None and name in DATA)
        gathered = tuple(name for name, dim in dims if dim is not None and name in DATA and name != "ep")
        key = (piece.compute, piece.leaf.trainable, copied, gathered)
        found[key] = found.get(key, 0) + piece.local
    return [(size, dtype.itemsize, *way) for (dtype, *way), size in found.items()]

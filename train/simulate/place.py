"""A model on a mesh, and one place in its pipeline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fnmodels import tree
from fnmodels.tree import Tree
from train.parallel import pipeline as pp
from train.parallel.mesh import Mesh

from .facts import Work
from .kept import Layer
from .pieces import Piece


@dataclass(frozen=True)
class Model:
    """shape: rows and columns of a microbatch on a rank. layers, head: what they keep of it, and send."""

    config: Any
    spec: Tree
    plan: Tree
    mesh: Mesh
    work: Work
    pipe: pp.Pipeline
    shape: tuple[int, int]
    layers: tuple[Layer, ...]
    head: int

    @property
    def stream(self) -> int:
        """Bytes of one microbatch's hidden states."""
        return math.prod(self.shape) * self.config.hidden_size * self.work.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """What one rank of the pipeline has. groups: the leaves that travel together, "layers.N" and "" for the others."""

    model: Model
    rank: int
    stages: tuple[int, ...]
    groups: Mapping[str, Sequence[Piece]]

    @property
    def first(self) -> bool:
        return 0 in self.stages

    @property
    def last(self) -> bool:
        return len(self.model.pipe.layers) - 1 in self.stages

    @property
    def pieces(self) -> list[Piece]:
        return [piece for group in self.groups.values() for piece in group]


def place(model: Model, rank: int) -> Place:
    """That of a rank of the pipeline."""
    spec = tree.flatten(pp.share(model.spec, model.config, model.pipe, rank))
    plan = tree.flatten(pp.share(model.plan, model.config, model.pipe, rank))
    groups: dict[str, list[Piece]] = {}
    for path, leaf in spec.items():
        head, _, rest = path.partition(".")
        name = f"layers.{rest.partition('.')[0]}" if head == "layers" else ""
        groups.setdefault(name, []).append(Piece(path, leaf, plan[path], model.mesh, model.work.dtype))
    return Place(model, rank, model.pipe.stages(rank), groups)

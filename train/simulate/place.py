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
from train.parallel.share import cut

from .facts import Work
from .kept import Ends, Layer
from .pieces import Piece


@dataclass(frozen=True)
class Model:
    """shape: rows and columns of a microbatch on a rank. layers, ends: what they keep of it, and send."""

    config: Any
    spec: Tree
    plan: Tree
    mesh: Mesh
    work: Work
    pipe: pp.Pipeline
    shape: tuple[int, int]
    layers: tuple[Layer, ...]
    ends: Ends

    @property
    def stream(self) -> int:
        """Bytes of one microbatch's hidden states."""
        return math.prod(self.shape) * self.config.hidden_size * self.work.dtype.itemsize


@dataclass(frozen=True)
class Place:
    """What one rank of the pipeline has: the leaves of its layers, by number, and each stage's outside of layers."""

    model: Model
    rank: int
    stages: tuple[int, ...]
    layers: Mapping[int, Sequence[Piece]]
    outside: Mapping[int, Sequence[Piece]]

    @property
    def pieces(self) -> list[Piece]:
        """Each leaf once."""
        outside = {piece.path: piece for group in self.outside.values() for piece in group}
        return [*outside.values(), *(piece for group in self.layers.values() for piece in group)]

    def is_last(self, stage: int) -> bool:
        return stage == len(self.model.pipe.layers) - 1


def place(model: Model, rank: int) -> Place:
    """That of a rank of the pipeline."""
    layers: dict[int, list[Piece]] = {}
    outside: dict[int, list[Piece]] = {}
    for stage in model.pipe.stages(rank):
        plan = tree.flatten(cut(model.plan, model.config, model.pipe, (stage,)))
        outside[stage] = []
        for path, leaf in tree.flatten(cut(model.spec, model.config, model.pipe, (stage,))).items():
            head, _, rest = path.partition(".")
            number, _, inner = rest.partition(".")
            group = layers.setdefault(int(number), []) if head == "layers" else outside[stage]
            name = inner if head == "layers" else path
            group.append(Piece(name, leaf, plan[path], model.mesh, model.work.dtype))
    return Place(model, rank, model.pipe.stages(rank), layers, outside)

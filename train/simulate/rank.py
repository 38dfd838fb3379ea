"""A model on a mesh, and one place in its pipeline."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import fnmodels
from fnmodels import tree
from fnmodels.tree import Tree
from train.parallel.mesh import Mesh
from train.parallel.pipeline import gradients as pp
from train.parallel.pipeline.timeline import Action, repeats
from train.parallel.pipeline.tree_split import cut

from .activations import Ends, Layer
from .facts import Work
from .local_leaves import Piece


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

    def again(self, stage: int) -> dict[int, bool]:
        """{layer: whether it keeps its input only}: as `train.remat` counts them, anew in each stage."""
        every = {"none": 0, "full": 1}.get(self.work.remat)
        every = int(self.work.remat.partition(":")[2]) if every is None else every
        kinds, seen = fnmodels.family_of(self.config).kinds(self.config), Counter[str]()
        found = dict[int, bool]()
        for i in range(*self.pipe.layers[stage]):
            seen[kinds[i]] += 1
            found[i] = every > 0 and seen[kinds[i]] % every == 0
        return found


@dataclass(frozen=True)
class Place:
    """What one rank of the pipeline has and does.

    actions: in order. layers: their leaves, by number; outside: each stage's leaves outside of them.
    """

    model: Model
    rank: int
    actions: Sequence[Action]
    layers: Mapping[int, Sequence[Piece]]
    outside: Mapping[int, Sequence[Piece]]

    @property
    def stages(self) -> tuple[int, ...]:
        return self.model.pipe.stages(self.rank)

    @functools.cached_property
    def repeats(self) -> dict[int, int]:
        """{layer: how often it is computed again in a step}."""
        found = dict[int, int]()
        for stage in self.stages:
            times = repeats(self.actions, stage)
            found |= {i: times * again for i, again in self.model.again(stage).items()}
        return found

    @property
    def pieces(self) -> list[Piece]:
        """Each leaf once."""
        outside = {piece.path: piece for group in self.outside.values() for piece in group}
        return [*outside.values(), *(piece for group in self.layers.values() for piece in group)]

    @functools.cached_property
    def halved(self) -> dict[int, int]:
        """{layer: in how many backward passes its inputs and its weights are taken one after the other}."""
        count = Counter(stage for kind, stage, _ in self.actions if kind == "W" and stage > 0)
        return {i: count[stage] for stage in self.stages for i in range(*self.model.pipe.layers[stage])}

    def is_last(self, stage: int) -> bool:
        return stage == len(self.model.pipe.layers) - 1


def place(model: Model, rank: int, actions: Sequence[Action]) -> Place:
    """That of a rank of the pipeline, which does this."""
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
    return Place(model, rank, actions, layers, outside)

"""`PipelineRank`: what one rank of a pipeline runs and holds, for a `SimulatedModel` sharded over a mesh."""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import fnmodels
from fnmodels import tree
from fnmodels.models.common.family import DecoderConfig
from fnmodels.tree import Tree
from train.parallel.mesh import Mesh
from train.parallel.pipeline.schedule import Pipeline
from train.parallel.pipeline.timeline import Action, repeats
from train.parallel.pipeline.tree_split import cut

from .activations import Ends, Layer
from .facts import Work
from .local_leaves import LocalLeaf


@dataclass(frozen=True)
class SimulatedModel:
    """shape: rows and positions of a microbatch on a rank. layers, ends: the bytes that they save and communicate."""

    config: DecoderConfig
    spec: Tree
    plan: Tree
    mesh: Mesh
    work: Work
    pipe: Pipeline
    shape: tuple[int, int]
    layers: tuple[Layer, ...]
    ends: Ends

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one microbatch's hidden states."""
        return math.prod(self.shape) * self.config.hidden_size * self.work.dtype.itemsize

    def recomputes(self, stage: int) -> dict[int, bool]:
        """{layer: whether it is recomputed}, as `train.remat` counts them, from the first layer of each stage."""
        every = {"none": 0, "full": 1}.get(self.work.remat)
        every = int(self.work.remat.partition(":")[2]) if every is None else every
        kinds, seen = fnmodels.family_of(self.config).kinds(self.config), Counter[str]()
        found = dict[int, bool]()
        for i in range(*self.pipe.layers[stage]):
            seen[kinds[i]] += 1
            found[i] = every > 0 and seen[kinds[i]] % every == 0
        return found


@dataclass(frozen=True)
class PipelineRank:
    """The parameters and actions of one pipeline rank.

    actions: in order. layers: their leaves, by layer; outside: each stage's leaves outside of layers.
    """

    model: SimulatedModel
    index: int
    actions: Sequence[Action]
    layers: Mapping[int, Sequence[LocalLeaf]]
    outside: Mapping[int, Sequence[LocalLeaf]]

    @property
    def stages(self) -> tuple[int, ...]:
        return self.model.pipe.stages(self.index)

    @functools.cached_property
    def recomputations(self) -> dict[int, int]:
        """{layer: how often it is recomputed in a step}."""
        found = dict[int, int]()
        for stage in self.stages:
            times = repeats(self.actions, stage)
            found |= {i: times * again for i, again in self.model.recomputes(stage).items()}
        return found

    @property
    def leaves(self) -> list[LocalLeaf]:
        """Each leaf once."""
        outside = {leaf.path: leaf for group in self.outside.values() for leaf in group}
        return [*outside.values(), *(leaf for group in self.layers.values() for leaf in group)]

    @functools.cached_property
    def split_backwards(self) -> dict[int, int]:
        """{layer: how many of its backward passes are split into one for inputs and one for weights}."""
        count = Counter(stage for kind, stage, _ in self.actions if kind == "W" and stage > 0)
        return {i: count[stage] for stage in self.stages for i in range(*self.model.pipe.layers[stage])}

    def is_last(self, stage: int) -> bool:
        return stage == len(self.model.pipe.layers) - 1


def pipeline_rank(model: SimulatedModel, index: int, actions: Sequence[Action]) -> PipelineRank:
    """The pipeline rank with this index and these actions."""
    layers: dict[int, list[LocalLeaf]] = {}
    outside: dict[int, list[LocalLeaf]] = {}
    for stage in model.pipe.stages(index):
        plan = tree.flatten(cut(model.plan, model.config, model.pipe, (stage,)))
        outside[stage] = []
        for path, leaf in tree.flatten(cut(model.spec, model.config, model.pipe, (stage,))).items():
            head, _, rest = path.partition(".")
            number, _, inner = rest.partition(".")
            group = layers.setdefault(int(number), []) if head == "layers" else outside[stage]
            name = inner if head == "layers" else path
            group.append(LocalLeaf(name, leaf, plan[path], model.mesh, model.work.dtype))
    return PipelineRank(model, index, actions, layers, outside)

"""Splits a params tree over the ranks of a pipeline: each holds its layers, and embedding or head."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.apply import layer_inputs_of
from fnmodels.models.common.registry import DecoderConfig, may_have
from fnmodels.tree import Tree

from .schedule import Pipeline


def ends(config: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The entries of params outside of the layers that the first stage holds, and those of the last.

    Found by recording which entries `embed`, `layer_inputs` and `unembed` read. Entries that none reads (MTP heads) are
    on the last stage. A tied embedding is on both, as is that of a model with MTP heads, which read it too.
    """
    return _watched(config, torch.float32)[:2]


def stream_of(config: Any, dtype: torch.dtype) -> Tensor:
    """Like the residual stream of one token [1, 1, D] on the meta device, where weights are of `dtype`."""
    return _watched(config, dtype)[2]


@functools.lru_cache(maxsize=16)
def _watched(config: DecoderConfig, dtype: torch.dtype) -> tuple[frozenset[str], frozenset[str], Tensor]:
    """`ends`, and `stream_of`."""
    family = fnmodels.family_of(config)
    spec = {name: leaf for name, leaf in family.spec(config).items() if name != "layers"}
    outside = tree.map(lambda leaf: torch.empty(leaf.shape, dtype=dtype, device="meta"), spec)
    first, last = _Reads(outside), _Reads(outside)
    inputs = _one_token(config)
    x = family.embed(first, inputs, config=config)
    layer_inputs_of(first, inputs, x, config=config)
    family.unembed(last, x, config=config)
    if "mtp" in outside:
        family.embed(last, inputs, config=config)
    held = frozenset(outside)
    return held & first.seen, held & (last.seen | (held - first.seen)), x


def _one_token(config: Any) -> dict[str, torch.Tensor]:
    """The inputs of one token, or of one patch, without values."""
    family = fnmodels.family_of(config)
    token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    if may_have(family, "INPUTS") != "patches":
        return {"tokens": token, "positions": token}
    positions = token[..., None].expand(1, 1, 4)
    pixels = torch.zeros(1, 1, config.num_channels * config.patch_size**2, device="meta")
    return {"tokens": pixels, "positions": positions, **may_have(family, "batch_inputs")(config, positions)}


class _Reads(dict[str, Any]):
    """A dict that records which keys were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)


def share(whole: Tree, config: DecoderConfig, pipe: Pipeline, rank: int) -> Tree:
    """A rank's share of `whole`, a tree like the params: the params, a spec, a plan.

    Layers become a dict keyed by their number as a string, so that every leaf keeps its path. A tied embedding is in
    the shares of the first and the last stage; see `copies`.
    """
    return cut(whole, config, pipe, pipe.stages(rank))


def cut(whole: Tree, config: DecoderConfig, pipe: Pipeline, stages: Sequence[int]) -> Tree:
    first, last = ends(config)
    names = (first if 0 in stages else frozenset()) | (last if len(pipe.layers) - 1 in stages else frozenset())
    layers = numbered(whole["layers"])
    numbers = [index for stage in stages for index in range(*pipe.layers[stage])]
    lost = [index for index in numbers if index not in layers]
    if lost:
        raise ValueError(
            f"Stages {list(stages)} need layer {lost[0]}, but the params have those with the numbers {sorted(layers)}."
        )
    cut = {"layers": {str(index): layers[index] for index in numbers}}
    return {n: cut.get(n, part) for n, part in whole.items() if n in names or n == "layers"}


def check_share(params: Tree, config: DecoderConfig, pipe: Pipeline, stages: Sequence[int]) -> None:
    """ValueError for params that hold more than these stages, since the rest would get no gradients here."""
    own = cut(params, config, pipe, stages)
    extra = sorted(params.keys() - own.keys())
    layers = sorted(set(numbered(params["layers"])) - set(numbered(own["layers"])))
    if extra or layers:
        what = repr(extra[0]) if extra else f"layer {layers[0]}"
        raise ValueError(
            f"The params hold {what}, which is not of stages {list(stages)}: give each rank its own part, as "
            "train.parallel.pipeline.tree_split.share cuts it, or train.parallel.pipeline.stages.stage_plan."
        )


def numbered(layers: Tree) -> dict[int, Tree]:
    """{number: layer} of a list, or of a dict whose keys are numbers or strings of them."""
    pairs = layers.items() if isinstance(layers, Mapping) else enumerate(layers)
    return {int(index): layer for index, layer in pairs}


def copies(config: DecoderConfig, pipe: Pipeline, rank: int) -> frozenset[str]:
    """The entries of this rank's share that another rank also has and counts: left out of norms and checkpoints."""
    if rank != pipe.ranks[-1] or rank == pipe.ranks[0]:
        return frozenset()
    first, last = ends(config)
    return first & last

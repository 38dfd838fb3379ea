"""Splits a params tree over the ranks of a pipeline: each holds its layers, and what else its stages read.

An entry is a path outside of the layers, of the first level ("embed_tokens"), or below an encoder or a decoder
("encoder.norm"). In a model with loops a layer is one too ("layers.3"), which several stages may run. Entries that
several ranks read, such as a tied embedding or a table of relative position biases, are on each of them, and their
gradients are summed.
"""

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.apply import layer_inputs_of, stack_params
from fnmodels.models.common.family import DecoderConfig, field_of, function_of, traits_of
from fnmodels.models.common.registry import family_of
from fnmodels.tree import Tree

from .schedule import Pipeline
from .stacks import Stack, layers_of, stacks_of


def ends(config: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The entries that the first stage holds, and those of the last, of a pipeline of several stages."""
    count = stacks_of(config)[-1].hi
    return held(config, 0, 1), held(config, count - 1, count)


@functools.lru_cache(maxsize=256)
def held(config: Any, lo: int, hi: int) -> frozenset[str]:
    """The entries that a stage of layers lo <= i < hi holds.

    Found by recording which entries `embed`, `layer_inputs`, `shared` and `unembed` read. Entries that none reads (MTP
    heads, a classifier) are on the last stage. That of a model with MTP heads holds the embedding too.
    """
    stacks, found = stacks_of(config), set[str]()
    reads = [_reads(config, stack) for stack in stacks]
    for number, (stack, (begin, every, _)) in enumerate(zip(stacks, reads, strict=True)):
        if lo <= stack.lo < hi:
            found |= begin | (reads[number - 1][2] if number else frozenset())
        if stack.within(lo, hi):
            found |= every
    if hi == stacks[-1].hi:
        found |= reads[-1][2] | (_entries(config) - frozenset().union(*itertools.chain(*reads)))
    if field_of(config, "passes"):
        found |= {f"layers.{number}" for number in stacks[0].stored(lo, hi)}
    return frozenset(found)


def _entries(config: Any) -> frozenset[str]:
    names = {stack.name for stack in stacks_of(config)}
    spec = family_of(config).spec(config)
    own = {name for name in spec if name not in names}
    own |= {f"{name}.{inner}" for name in names if name for inner in spec[name]}
    return frozenset(entry for entry in own if entry.rpartition(".")[2] != "layers")


@functools.lru_cache(maxsize=64)
def _reads(config: Any, stack: Stack) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The entries that the stage of a stack's first layer reads, those that each of its stages reads, and the last."""
    family, own = family_of(stack.config), stack.config
    begin, every, end = (_outside(config, stack, torch.float32) for _ in range(3))
    inputs = _one_token(own)
    x = family.embed(begin, inputs, config=own)
    layer_inputs_of(begin, inputs, x, config=own)
    if (shared := function_of(family, "shared")) is not None:
        shared(every, {**inputs, "memory": None, "memory_mask": None}, config=own)
    if (outputs := function_of(family, "outputs")) is not None:
        outputs(end, x, inputs, config=own)
    else:
        family.unembed(end, x, config=own)
    if "mtp" in end:
        family.embed(end, inputs, config=own)
    prefixed = family_of(config).spec(config)[stack.name] if stack.name else {}
    made = ([f"{stack.name}.{name}" if name in prefixed else name for name in one.seen] for one in (begin, every, end))
    first, each, last = (frozenset(names) & _entries(config) for names in made)
    return first, each, last


def stream_like(config: Any, stack: Stack, inputs: Any, dtype: torch.dtype) -> Tensor:
    """Like the hidden states [B, S, D] of a stack, on the meta device, where weights are of `dtype`."""
    outside = _outside(config, stack, dtype)
    given = {"tokens": inputs} if isinstance(inputs, Tensor) else inputs
    on_meta = {name: x.to("meta") for name, x in given.items() if isinstance(x, Tensor)}
    x: Tensor = family_of(stack.config).embed(outside, on_meta, config=stack.config)
    return x.contiguous()


def _outside(config: Any, stack: Stack, dtype: torch.dtype) -> "_Reads":
    """The params outside of the layers, as the stack reads them, on the meta device."""
    spec = fnmodels.family_of(config).spec(config)
    spec = stack_params(spec, stack.name) if stack.name else spec
    rest = {name: leaf for name, leaf in spec.items() if name != "layers"}
    return _Reads(tree.map(lambda leaf: torch.empty(leaf.shape, dtype=dtype, device="meta"), rest))


def _one_token(config: Any) -> dict[str, torch.Tensor]:
    """The inputs of one token, patch or frame, or of one token of a text and one of latents, without values."""
    family = fnmodels.family_of(config)
    token = torch.zeros(1, 1, dtype=torch.long, device="meta")
    kind = traits_of(family).inputs
    if (example := function_of(family, "example_inputs")) is not None:
        found: dict[str, Tensor] = example(config, token.expand(1, 2) if kind == "latents" else token)
        return found
    if kind != "patches":
        of_tokens = function_of(family, "token_inputs")(config, token, token)
        ngrams = field_of(config, "ngram_size")
        before = {"preceding": token[..., None].expand(1, 1, ngrams - 1)} if ngrams else {}
        return {"tokens": token, "positions": token, **of_tokens, **before}
    positions = token[..., None].expand(1, 1, 4)
    pixels = torch.zeros(1, 1, config.num_channels * config.patch_size**2, device="meta")
    return {"tokens": pixels, "positions": positions, **function_of(family, "batch_inputs")(config, positions)}


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


def cut(whole: Tree, config: Any, pipe: Pipeline, stages: Sequence[int]) -> Tree:
    """The share of some stages of `whole`, see `share`."""
    entries = frozenset().union(*(held(config, *pipe.layers[stage]) for stage in stages))
    made = {name: part for name, part in whole.items() if name in entries}
    for stack in stacks_of(config):
        layers = layers_of(whole, stack)
        numbers = list(dict.fromkeys(index for stage in stages for index in stack.stored(*pipe.layers[stage])))
        if lost := [index for index in numbers if index not in layers]:
            raise ValueError(
                f"Stages {list(stages)} need layer {lost[0]}{f' of the {stack.name}' if stack.name else ''}, but the "
                f"params have those with the numbers {sorted(layers)}."
            )
        own = {"layers": {str(index): layers[index] for index in numbers}} if numbers else {}
        if not stack.name:
            made |= own
            continue
        own |= {name: part for name, part in whole.get(stack.name, {}).items() if f"{stack.name}.{name}" in entries}
        made |= {stack.name: own} if own else {}
    return {name: made[name] for name in whole if name in made}


def check_share(params: Tree, config: DecoderConfig, pipe: Pipeline, stages: Sequence[int]) -> None:
    """ValueError for params that hold more than these stages, since the rest would get no gradients here."""
    own = cut(params, config, pipe, stages)
    extra = sorted(tree.flatten(params).keys() - tree.flatten(own).keys())
    if extra:
        inner = [path for path in extra if "layers." not in path]
        what = repr(inner[0].partition(".")[0]) if inner else _layer_named(min(extra, key=_number))
        raise ValueError(
            f"The params hold {what}, which is not of stages {list(stages)}: give each rank its own part, as "
            "train.parallel.pipeline.tree_split.share cuts it, or train.parallel.pipeline.stages.stage_plan."
        )


def _number(path: str) -> int:
    return int(path.partition("layers.")[2].partition(".")[0])


def _layer_named(path: str) -> str:
    stack = path.partition("layers.")[0].rstrip(".")
    return f"layer {_number(path)}" + (f" of the {stack}" if stack else "")


def holders(config: Any, pipe: Pipeline) -> dict[str, tuple[int, ...]]:
    """{entry: the ranks that hold it, in the order of their stages} of entries that more than one holds."""
    ranks: dict[str, dict[int, None]] = {}
    for rank, layers in zip(pipe.ranks, pipe.layers, strict=True):
        for entry in held(config, *layers):
            ranks.setdefault(entry, {})[rank] = None
    return {entry: tuple(found) for entry, found in sorted(ranks.items()) if len(found) > 1}


def entry_of(path: str, entries: Iterable[str]) -> str | None:
    """The one of the entries in which the path of a parameter is; None: in none."""
    return next((entry for entry in entries if path == entry or path.startswith(f"{entry}.")), None)


def copies(config: DecoderConfig, pipe: Pipeline, rank: int) -> frozenset[str]:
    """The entries of this rank's share that another rank also has and counts: left out of norms and checkpoints."""
    return frozenset(entry for entry, ranks in holders(config, pipe).items() if rank in ranks[1:])

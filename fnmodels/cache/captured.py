"""`captured_step`: `prepare_step` and `decode_` as one CUDA graph.

A step of decoding is some hundred small kernels, whose launches take longer than their work. A graph launches all of
them at once. It reads and writes fixed memory: the tensors of the first cache's layers, which the caches that steps
return hold too, and copies of what is small.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.models.common.registry import DecoderConfig
from fnmodels.ops.slots import SLOTTED
from fnmodels.ops.torch_internals import one_graph
from fnmodels.options import ForwardKwargs, ForwardOptions
from fnmodels.tree import Tree

from .compiled import DecodingStep
from .prepare import prepare_step
from .step import logits_at, step_on
from .value import Cache, consume, is_clean, known_clean

WARM_UPS = 2  # libraries choose their kernels and take their workspaces in the first runs


def captured_step(config: DecoderConfig, *, compiled: bool = False, **options: Unpack[ForwardKwargs]) -> DecodingStep:
    """One step of decoding as a CUDA graph, for many steps of one shape: what `decode_` computes, to the bit.

    compiled: capture the code of torch.compile, which has fewer and larger kernels and other roundings, and takes a
    minute to make.

    It is captured anew for each cache that no step of it returned, for other parameters and for other shapes of tokens,
    and keeps the memory of the last such cache. Parameters that are written in place need no new graph. Values are not
    checked: a row without room drops its token. options: as for `fnmodels.forward`; what they call runs once per
    capture. ValueError for tensors that are not on a CUDA device.
    """
    given = ForwardOptions(**options)
    captures: list[_Capture] = []

    def compute(params: Tree, tokens: Tensor, cache: Cache, more: dict[str, Any]) -> tuple[Tensor, Cache]:
        prepared = prepare_step(config, tokens, cache, **more)
        x, after = step_on(params, prepared, cache, config, given, inplace=True, clean=True)
        return logits_at(params, x, prepared[0], config, "all", given.edits), after

    run = one_graph(compute) if compiled else compute

    @torch.no_grad()
    def step(
        params: Tree,
        tokens: Tensor,
        cache: Cache,
        *,
        segment_ids: Tensor | None = None,
        length: int | Tensor | None = None,
    ) -> tuple[Tensor, Cache]:
        if not tokens.is_cuda:
            raise ValueError(
                f"A captured step is a CUDA graph, and the tokens are on {tokens.device}: move parameters, tokens and "
                "cache to a CUDA device, or take fnmodels.compiled_step."
            )
        cache = _finite(cache)
        inputs = {"tokens": tokens, "segment_ids": segment_ids, "length": length}
        key = _key(params, inputs, cache)
        found = next((each for each in captures if each.key == key and each.holds(cache)), None)
        if found is None:
            captures[:] = [each for each in captures if each.in_use]
            found = _capture(run, key, params, inputs, cache)
            captures.append(found)
        return found.replay(inputs, cache)

    return step


@dataclass
class _Capture:
    """A graph with the memory that it reads and writes. params: kept, as the graph reads their memory.

    last: the cache that was returned last, which holds this memory until it is used up or dropped.
    """

    key: Any
    graph: torch.cuda.CUDAGraph
    params: Tree
    inputs: dict[str, Any]
    cache: Cache
    logits: Tensor
    last: "weakref.ref[Cache] | None" = None

    @property
    def in_use(self) -> bool:
        last = None if self.last is None else self.last()
        return last is not None and "layers" in vars(last)

    def holds(self, cache: Cache) -> bool:
        """Whether the cache is in this memory. No other is copied here: what was read from the last may be in use."""
        mine = {id(leaf) for leaf in _entries(self.cache)}
        return any(id(leaf) in mine for leaf in _entries(cache))

    def replay(self, inputs: dict[str, Any], cache: Cache) -> tuple[Tensor, Cache]:
        _fill((self.inputs, self.cache), (inputs, cache))
        consume(cache)
        self.graph.replay()
        after = known_clean(replace(self.cache))
        self.last = weakref.ref(after)
        return self.logits.clone(), after


def _capture(
    compute: Callable[..., tuple[Tensor, Cache]], key: Any, params: Tree, inputs: dict[str, Any], cache: Cache
) -> _Capture:
    """The graph of a step, which has not run yet. The layers' tensors of `cache` become its memory."""
    own = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    held = replace(cache, slots=tree.map(Tensor.clone, cache.slots), memory=tree.map(Tensor.clone, cache.memory))
    before = _states(held)
    kept = [state.clone() for state in before]  # a step that runs twice writes the same keys, but not the same state
    more = {name: own[name] for name in ("segment_ids", "length")}

    def once() -> Tensor:
        logits, after = compute(params, own["tokens"], held, more)
        _fill((held.slots, held.layers), (after.slots, after.layers))
        return logits

    slots = tree.map(Tensor.clone, held.slots)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UPS):
            once()
            _fill((held.slots, before), (slots, kept))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = once()
    return _Capture(key, graph, params, own, held, logits)


def _fill(held: Any, given: Any) -> None:
    """Copies the tensors of a tree into those of another, where they are not the same."""
    for mine, new in zip(tree.leaves(held), tree.leaves(given), strict=True):
        if isinstance(mine, Tensor) and mine is not new:
            mine.copy_(new)


def _finite(cache: Cache) -> Cache:
    """The cache with finite values in its empty slots, see `is_clean`: written there once, and not in each step."""
    if not is_clean(cache):
        for kind, entry in zip(cache.kinds, cache.layers, strict=True):
            for name in SLOTTED & entry.keys():
                empty = ~cache.slots[kind].occupied
                entry[name].masked_fill_(empty.reshape(*empty.shape, *[1] * (entry[name].ndim - 2)), 0)
    return cache


def _key(params: Tree, inputs: dict[str, Any], cache: Cache) -> Any:
    """What a graph is made for: the memory of the parameters, sizes and dtypes of what is copied, and constants."""
    constants = {name: (v.shape, v.dtype) if isinstance(v, Tensor) else v for name, v in inputs.items()}
    sizes = [(leaf.shape, leaf.dtype) for leaf in tree.leaves((cache.slots, cache.memory))]
    return [leaf.data_ptr() for leaf in tree.leaves(params) if isinstance(leaf, Tensor)], constants, sizes, cache.length


def _entries(cache: Cache) -> Iterator[Tensor]:
    return (leaf for entry in cache.layers for leaf in entry.values())


def _states(cache: Cache) -> list[Tensor]:
    """The tensors of layers that are not made of slots."""
    return [leaf for entry in cache.layers for name, leaf in entry.items() if name not in SLOTTED]

"""`captured_step`: `prepare_step` and `decode_` as one CUDA graph.

A step of decoding is hundreds of small kernels, whose launches take longer than their work. A graph launches all of
them at once. It reads and writes fixed memory: the slots of the first cache's layers, which the caches that steps
return hold too, and copies of what is small.
"""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.values import Constants, without_host
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.registry import refuse_towers
from fnmodels.ops.slots import MEMORY, SLOTTED
from fnmodels.ops.torch_compilation import WARM_UPS, beside, capture, fill
from fnmodels.options import ForwardKwargs, ForwardOptions
from fnmodels.tree import Tree

from .compiled import DecodingStep
from .prepare import prepare_step
from .step import logits_at, step_on
from .value import Cache, consume, is_clean, known_clean

Inputs = dict[str, Any]  # tokens, segment_ids, length
Compute = Callable[[Tree, Inputs, Cache], tuple[Tensor, Cache]]


def captured_step(config: DecoderConfig, **options: Unpack[ForwardKwargs]) -> DecodingStep:
    """One step of one token per row as a CUDA graph, for many steps of one shape.

    It has the bits of `decode_` with the same `experts`: "auto" is "grouped" for rows of bf16 on devices of compute
    capability 9 and 10 where widths allow it, and "dense" elsewhere, for the other ways read counts on the host.

    It is captured anew for each cache that no step of it returned, for other parameters and for other shapes, and keeps
    the memory of a cache until another one is captured. Parameters that are written in place need no new graph. Values
    are not checked: a row without room drops its token.

    Args:
        config: The model's config.
        **options: Keywords of `fnmodels.forward`; their functions run in each capture, a few times, and not in steps,
            and must read no values.

    Returns:
        The step, (params, tokens [B, 1], cache) -> (logits, cache).

    Raises:
        ValueError: kernel is "invariant"; by a step, for several tokens per row and for tensors that are not on a CUDA
            device.
    """
    refuse_towers(config)
    given = ForwardOptions(**options)
    if given.invariant:
        raise ValueError('A captured step reads no values, which kernel="invariant" does: take fnmodels.decode_.')
    captures: list[_Capture] = []

    def compute(params: Tree, inputs: Inputs, cache: Cache) -> tuple[Tensor, Cache]:
        tokens, more = inputs["tokens"], {name: inputs[name] for name in ("segment_ids", "length")}
        prepared = prepare_step(config, tokens, cache, **more)
        x, after = step_on(params, prepared, cache, config, given, inplace=True, clean=True)
        return logits_at(params, x, prepared[0], config, "all", given.edits), after

    @torch.no_grad()
    def step(
        params: Tree,
        tokens: Tensor,
        cache: Cache,
        *,
        segment_ids: Tensor | None = None,
        length: int | Tensor | None = None,
    ) -> tuple[Tensor, Cache]:
        _check_tokens(tokens)
        cache = finite(cache)
        inputs = {"tokens": tokens, "segment_ids": segment_ids, "length": length}
        key = _key(params, inputs, cache)
        with torch.cuda.device(tokens.device):
            found = next((each for each in captures if each.key == key and each.holds(cache)), None)
            if found is None:
                captures[:] = [each for each in captures if each.in_use]
                found = _capture(compute, key, params, inputs, cache)
                captures.append(found)
            return found.replay(inputs, cache)

    return step


def _check_tokens(tokens: Tensor) -> None:
    if not tokens.is_cuda:
        raise ValueError(
            f"A captured step is a CUDA graph, and the tokens are on {tokens.device}: move parameters, tokens and "
            "cache to a CUDA device, or take fnmodels.compiled_step."
        )
    if tokens.shape[1] != 1:
        raise ValueError(
            f"The tokens are {list(tokens.shape)}: a captured step takes one per row, [B, 1], and fnmodels.decode_ "
            "takes several."
        )


@dataclass(frozen=True, eq=False)
class _Key:
    """The facts that a graph is made for: parameters in their memory, sizes and dtypes of copies, and constants.

    The parameters are kept, so that no other tensor gets the memory that the graph reads.
    """

    leaves: list[Any]
    places: list[int]
    structure: Any  # with the static fields of adapters and packed weights
    others: Any

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Key)
            and self.places == other.places
            and self.others == other.others
            and all(one is two for one, two in zip(self.leaves, other.leaves, strict=True))
            and self.structure == other.structure
        )


def _key(params: Tree, inputs: Inputs, cache: Cache) -> _Key:
    leaves = tree.leaves(params)
    constants = {name: (v.shape, v.dtype) if isinstance(v, Tensor) else v for name, v in inputs.items()}
    sizes = [(leaf.shape, leaf.dtype) for leaf in tree.leaves((cache.slots, cache.memory))]
    places = [leaf.data_ptr() if isinstance(leaf, Tensor) else 0 for leaf in leaves]
    return _Key(leaves, places, tree.structure(params), (constants, sizes, cache.length))


@dataclass
class _Capture:
    """A graph with the memory that it reads and writes.

    last: the cache that was returned last, which holds this memory until it is used up or dropped.
    """

    key: _Key
    graph: torch.cuda.CUDAGraph
    inputs: Inputs
    cache: Cache
    logits: Tensor
    constants: Constants
    last: "weakref.ref[Cache] | None" = None

    @property
    def in_use(self) -> bool:
        last = None if self.last is None else self.last()
        return last is not None and "layers" in vars(last)

    def holds(self, cache: Cache) -> bool:
        """Whether all of the cache's layers are in this memory: no other is copied here, for others may read it."""
        mine = {id(leaf) for leaf in _written(self.cache)}
        return all(id(leaf) in mine for leaf in _written(cache))

    def replay(self, inputs: Inputs, cache: Cache) -> tuple[Tensor, Cache]:
        fill(self.inputs, inputs)
        fill((self.cache.slots, self.cache.memory), (cache.slots, cache.memory))
        consume(cache)
        self.graph.replay()
        after = known_clean(replace(self.cache))
        self.last = weakref.ref(after)
        return self.logits.clone(), after


def _capture(compute: Compute, key: _Key, params: Tree, inputs: Inputs, cache: Cache) -> _Capture:
    """The graph of a step, which has not run yet. The slots of `cache` become its memory.

    The runs before write the key and value that the first replay writes again; states, which would advance, are copies.
    """
    own = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
    layers = tuple({name: t if name in SLOTTED else t.clone() for name, t in entry.items()} for entry in cache.layers)
    held = replace(cache, layers=layers, slots=tree.map(Tensor.clone, cache.slots))
    held = replace(held, memory=tree.map(Tensor.clone, cache.memory))
    constants, side = Constants(), torch.cuda.Stream()

    def once() -> Tensor:
        with without_host(constants):
            logits, after = compute(params, own, held)
        fill((held.slots, held.layers), (after.slots, after.layers))
        return logits

    def warm() -> None:
        for _ in range(WARM_UPS):
            once()
            fill((held.slots, _states(held)), (cache.slots, _states(cache)))

    beside(side, warm)
    graph, logits = capture(once, side)
    return _Capture(key, graph, own, held, logits, constants)


def finite(cache: Cache) -> Cache:
    """The cache with finite values in its empty slots, see `is_clean`: written there once, and not in the graph."""
    if not is_clean(cache):
        for kind, entry in zip(cache.kinds, cache.layers, strict=True):
            for name in SLOTTED & entry.keys():
                empty = ~cache.slots[kind].occupied
                entry[name].masked_fill_(empty.reshape(*empty.shape, *[1] * (entry[name].ndim - 2)), 0)
    return cache


def _written(cache: Cache) -> Iterator[Tensor]:
    """The tensors of the layers that steps write."""
    return (leaf for entry in cache.layers for name, leaf in entry.items() if name not in MEMORY)


def _states(cache: Cache) -> list[Tensor]:
    """The tensors of layers that are not made of slots."""
    return [leaf for entry in cache.layers for name, leaf in entry.items() if name not in SLOTTED | MEMORY]

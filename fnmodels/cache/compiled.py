"""`compiled_step`: `prepare_step` and `decode_` as one compiled graph."""

from dataclasses import replace
from typing import Protocol, Unpack

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.models.common.family import DecoderConfig
from fnmodels.models.common.registry import refuse_towers
from fnmodels.ops.torch_compilation import mark_dynamic, one_graph
from fnmodels.options import ForwardKwargs, ForwardOptions
from fnmodels.tree import Tree

from .prepare import prepare_step
from .step import logits_at, step_on
from .value import Cache, consume, is_clean, known_clean

BLOCK = 64  # slots


class DecodingStep(Protocol):
    """A step of decoding: (params, tokens [B, S], cache) -> (logits [B, S, V], cache), as `compiled_step` returns it.

    The cache that it receives is used up. Keywords: segment_ids [B, S] (None: each row goes on with its document) and
    length, as for `prepare_step`.
    """

    def __call__(
        self,
        params: Tree,
        tokens: Tensor,
        cache: Cache,
        *,
        segment_ids: Tensor | None = None,
        length: int | Tensor | None = None,
    ) -> tuple[Tensor, Cache]: ...


def compiled_step(config: DecoderConfig, **options: Unpack[ForwardKwargs]) -> DecodingStep:
    """One step of decoding as a graph by torch.compile, for many steps of one shape: the first takes a minute on a CPU.

    The step computes what `decode_(params, *prepare_step(config, tokens, cache), cache)` does, up to the rounding of
    fused code. It compiles once per shape of tokens and cache, and a second time for the second such shape, whose sizes
    are symbols from then on; steps that read a cache's last slots are a graph of their own. Values are not checked: a
    row without room drops its token.

    Args:
        config: The model's config.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        The step, (params, tokens [B, S], cache) -> (logits [B, S, V], cache).

    Raises:
        ValueError: There is a layer_fn, or kernel is "invariant".
    """
    refuse_towers(config)
    given = ForwardOptions(**options)
    if given.layer_fn is not None or given.invariant:
        what = 'kernel="invariant"' if given.invariant else "layer_fn"
        raise ValueError(f"A compiled step is one graph, which {what} cannot be a part of: take fnmodels.decode_.")

    def graph(
        params: Tree,
        tokens: Tensor,
        cache: Cache,
        segment_ids: Tensor | None,
        length: int | Tensor | None,
        clean: bool,
        read: Tensor | None,
    ) -> tuple[Tensor, Cache]:
        prepared = prepare_step(config, tokens, cache, segment_ids=segment_ids, length=length)
        slots = None if read is None else read.shape[0] * BLOCK
        x, after = step_on(params, prepared, cache, config, given, inplace=True, clean=clean, filled=slots)
        return logits_at(params, x, prepared[0], config, "all", given.edits), after

    run = one_graph(graph)

    @torch.no_grad()
    def step(
        params: Tree,
        tokens: Tensor,
        cache: Cache,
        *,
        segment_ids: Tensor | None = None,
        length: int | Tensor | None = None,
    ) -> tuple[Tensor, Cache]:
        clean, read = is_clean(cache), _slots_read(cache, tokens, segment_ids)
        logits, after = run(params, tokens, _with_own_slots(cache), segment_ids, length, clean, read)
        consume(cache)
        return logits, known_clean(after)

    return step


def _slots_read(cache: Cache, tokens: Tensor, segment_ids: Tensor | None) -> Tensor | None:
    """An empty tensor whose size is the number of blocks of slots that the fullest row fills in this step, at least 2.

    A size is a symbol of the graph, where an int, or a size of 1, would be a constant. None: all slots are read, as in
    rings, in small caches, where values are on a device, and from where the cache has no whole block left, in a graph
    of its own. All kinds without rings hold as many tokens.
    """
    held = next((slots.segments for slots in cache.slots.values() if not slots.ring), None)
    if held is None or not held.is_cpu or (room := held.shape[1]) <= 2 * BLOCK:
        return None
    if segment_ids is None:
        filled = max(held.count_nonzero(1).tolist()) + tokens.shape[1]  # further operations take longer than Python
    else:
        filled = int((held.count_nonzero(1) + (segment_ids > 0).sum(1)).amax())
    if (blocks := max(2, -(-filled // BLOCK))) * BLOCK >= room:
        return None
    read = torch.empty(blocks, 0)
    mark_dynamic(read, 0)
    return read


def _with_own_slots(cache: Cache) -> Cache:
    """The cache with tensors of its own for each kind's slots: a graph is compiled for tensors that are one or not.

    Kinds share them after a step, and not in a new cache or in one whose rows were taken or inserted.
    """
    if len(cache.slots) < 2:
        return cache
    first, *others = cache.slots.items()
    return replace(cache, slots=dict([first, *((kind, tree.map(Tensor.clone, slots)) for kind, slots in others)]))

"""The plan of running some layers of a model: all but tensors, decided once for each config and set of options.

A plan is a value: equal arguments give equal plans, and it holds neither tensors nor functions of the caller. So plans
are kept, a bounded number of them; those whose options hold functions are made in each call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from fnmodels.models.common.carried import joins, own_choices
from fnmodels.models.common.family import (
    DecoderConfig,
    Family,
    LayerKind,
    field_of,
    function_of,
    is_routed,
    stored_layers,
    traits_of,
)
from fnmodels.models.common.registry import family_of
from fnmodels.ops.attention.select import Asks
from fnmodels.ops.moe.layer import MOE_TAPS
from fnmodels.options import Block, ForwardOptions, PerLayer
from fnmodels.taps import AROUND, wanted_taps

_KEPT = 128  # plans


@dataclass(frozen=True)
class LayerPlan:
    """One layer of a stack, or one pass of a layer that runs several times.

    stored: where its parameters are in params["layers"].
    block: the family's, with config, kind, options and taps bound; equal objects for layers of one kind and choice.
    options: the layer's own, with what a `PerLayer` chose. choice: that choice as a key; None where there is none.
    expert_row: which of the MoE layers it is; None: it has no experts. choice_row: of which indexer, counted from the
    first, it takes the choice of keys; None: it attends without one. chooses: whether that indexer is its own. lender:
    the kind whose keys and values it reads; None: its own. joins: whether it reads what the layer before has left.
    """

    index: int
    stored: int
    kind: str
    block: Block
    options: ForwardOptions
    choice: Any
    expert_row: int | None
    choice_row: int | None
    chooses: bool
    lender: str | None
    joins: bool


@dataclass(frozen=True)
class StackPlan:
    """Layers of a model that run in one call.

    kinds: of all layers of the model. first: the index of the first that runs here. stored: how many
    layers the params have. used: the kinds that run here,
    sorted. chosen: for each `LayerPlan.choice`, its kernel and its kinds. taps: of layers. wanted: (layer, name) of
    each tap. experts, indexers: how many layers of the model have them. leaves: whether a layer elsewhere reads what
    the last of these leaves. reads_beside: whether a layer reads tensors beside x and its mask and table. asks: what
    attention does to scores.
    """

    config: DecoderConfig
    kinds: tuple[str, ...]
    first: int
    stored: int
    layers: tuple[LayerPlan, ...]
    used: tuple[str, ...]
    chosen: tuple[tuple[Any, Any, tuple[str, ...]], ...]
    taps: tuple[str, ...]
    wanted: frozenset[tuple[int, str]]
    experts: int
    indexers: int
    leaves: bool
    reads_beside: bool
    asks: Asks


def plan_stack(
    config: DecoderConfig, layers: range | None, taps: tuple[str, ...], options: ForwardOptions
) -> StackPlan:
    """The plan of `layers` (None: all), ValueError for a range out of the model's and for unknown taps of layers."""
    family = family_of(config)
    kernel, experts, context = options.kernel, options.experts, options.context
    bound = options.layout is not None and field_of(config, "index_topk")
    named = isinstance(kernel, str) and isinstance(experts, str) and not isinstance(options.layer_fn, PerLayer)
    if not named or context is not None or bound or torch.compiler.is_compiling():
        return _made(family, config, layers, taps, options)
    hashable: Any = config
    return _kept(parts_of(family), hashable, layers and (layers.start, layers.stop), taps, str(kernel), str(experts))


def parts_of(family: Family) -> tuple[Any, ...]:
    """The functions and traits of a family that a plan holds or reads, which decide whether it serves again."""
    traits = traits_of(family)
    return family.block, family.kinds, function_of(family, "shared"), traits.routed, traits.sinks, traits.biased


@functools.lru_cache(_KEPT)
def _kept(
    parts: tuple[Any, ...],
    config: Any,
    layers: tuple[int, int] | None,
    taps: tuple[str, ...],
    kernel: str,
    experts: str,
) -> StackPlan:
    """parts: what a plan holds or reads of the family, so that others have other plans."""
    options = ForwardOptions(kernel=kernel, experts=experts)
    return _made(family_of(config), config, layers and range(*layers), taps, options)


def _made(
    family: Family, config: DecoderConfig, layers: range | None, taps: tuple[str, ...], options: ForwardOptions
) -> StackPlan:
    kinds = family.kinds(config)
    layers = range(len(kinds)) if layers is None else layers
    if not 0 <= layers.start <= layers.stop <= len(kinds):
        raise ValueError(
            f"lo is {layers.start} and hi is {layers.stop}, but 0 <= lo <= hi must hold and the model has {len(kinds)}."
        )
    tap_pairs = wanted_taps(config, taps, len(kinds), layers)
    sparse, indexers = [i for i, kind in enumerate(kinds) if is_routed(family, kind)], own_choices(kinds)
    names = tuple(sorted({name for _, name in tap_pairs}))
    stored = stored_layers(config, kinds)
    blocks: dict[Any, Block] = {}
    plans = []
    for index in layers:
        kind, layer_options = kinds[index], options.at(index)
        choice = None if layer_options is options else (layer_options.kernel, layer_options.layer_fn)
        if (kind, choice) not in blocks:
            blocks[kind, choice] = _bound(family, config, kind, names, layer_options)
        plans.append(
            LayerPlan(
                index,
                stored[index],
                kind,
                blocks[kind, choice],
                layer_options,
                choice,
                sparse.index(index) if index in sparse else None,
                sum(i <= index for i in indexers) - 1 if LayerKind.parse(kind).indexed else None,
                index in indexers,
                LayerKind.parse(kind).lender,
                LayerKind.parse(kind).joins,
            )
        )
    beside = field_of(config, "hidden_size_per_layer_input") or function_of(family, "shared") is not None
    beside = beside or any(p.expert_row is not None or p.choice_row is not None or p.lender or p.joins for p in plans)
    choices = {plan.choice: plan.options.kernel for plan in plans}
    kinds_of = {choice: sorted({plan.kind for plan in plans if plan.choice == choice}) for choice in choices}
    return StackPlan(
        config,
        kinds,
        layers.start,
        max(stored) + 1,
        tuple(plans),
        tuple(sorted({plan.kind for plan in plans})),
        tuple((choice, kernel, tuple(kinds_of[choice])) for choice, kernel in choices.items()),
        taps,
        tap_pairs,
        len(sparse),
        len(indexers),
        joins(kinds, layers.stop),
        bool(beside),
        Asks(field_of(config, "attention_softcap") is not None, traits_of(family).sinks, traits_of(family).biased),
    )


def _bound(family: Family, config: DecoderConfig, kind: str, taps: tuple[str, ...], options: ForwardOptions) -> Block:
    """(layer, x, mask, freqs, **tensors) -> (x, aux), with only hashable values bound."""
    elsewhere = AROUND if is_routed(family, kind) else (*AROUND, *MOE_TAPS)
    # Ready masks need no layout, and a bound one would give compiled blocks a graph per layout.
    layout = options.layout if callable(options.kernel) or LayerKind.parse(kind).indexed else None
    return functools.partial(
        family.block,
        config=config,
        kind=kind,
        options=replace(options, layer_fn=None, edits=None, layout=layout),
        taps=tuple(name for name in taps if name not in elsewhere),
    )

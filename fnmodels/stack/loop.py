"""The loop over the layers of a stack: what each block is given, and what it returns beside x."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnmodels.edits import BoundEdit, edits_of_layers, missed
from fnmodels.inputs.mask import MaskLike
from fnmodels.inputs.noise import fold
from fnmodels.models.common.family import LayerKind, function_of
from fnmodels.models.common.registry import family_of
from fnmodels.ops.dropout import Noise
from fnmodels.ops.slots import Entry, SlotUse
from fnmodels.ops.streams.hyper import mean, with_mean
from fnmodels.options import Block, ForwardOptions
from fnmodels.stack.checks import (
    check_choices,
    check_fit,
    check_layer_inputs,
    check_layers,
    check_routing,
    valid_tokens,
)
from fnmodels.stack.plan import LayerPlan, StackPlan
from fnmodels.stack.ready import note_ready, ready_masks, ready_tables
from fnmodels.taps import AROUND, check_tap_names, list_of_taps
from fnmodels.tree import Tree

LayerEdits = Mapping[str, tuple[BoundEdit, dict[str, Tensor]]]  # by tap of one layer
_NO_EDITS: LayerEdits = {}
_USUAL = SlotUse()


class CacheStep(NamedTuple):
    """The part of a cache that layers read and write in one call.

    entries: {layer index: its tensors}. slots: {kind: slot of each new token, int64 [B, S]; C for a token that is not
    written}, for kinds with slots. uses: {kind: how entries are read}, which says what the mask's keys are; by default
    the cached slots, then the new tokens. occupied: {kind: bool [B, C]} where empty slots may hold NaN. plan: that of
    the layers, where it is known. ready: the sizes [B, S] of x for which masks and tables were made and are in the form
    that layers read, without padding; None: not known.
    """

    entries: Mapping[int, Entry]
    slots: Mapping[str, Tensor] = {}
    uses: Mapping[str, SlotUse] = {}
    occupied: Mapping[str, Tensor] = {}
    plan: StackPlan | None = None
    ready: tuple[int, int] | None = None

    def is_ready(self, x: Tensor) -> bool:
        """Whether masks and tables were made for tokens as many as those of x, and none of them is padding."""
        return self.ready is not None and self.ready == x.shape[:2]

    def keywords(self, kind: str, *, bound: bool) -> dict[str, Any]:
        """The keywords of the calls of all layers of a kind, beside their own entries. bound: without `use`."""
        tensors: dict[str, Any] = {} if bound else {"use": self.use(kind)}
        if kind in self.slots:
            tensors["slots"] = self.slots[kind]
        if kind in self.occupied:
            tensors["occupied"] = self.occupied[kind]
        return tensors

    def use(self, kind: str) -> SlotUse:
        """The use that the layers of a kind make of their entries."""
        return self.uses.get(kind, _USUAL)


class LayerInputs(NamedTuple):
    """Batch tensors that layers read: masks and tables by kind, valid [B, S], cache; of all layers the others.

    routing: [B, S, MoE layers, k]. choices: [B, S, layers with an indexer, k]. layer_inputs: [B, S, layers, P], or of
    the last layers alone. shared: what every layer reads, see `family.function_of`. noise: keys [B, S] of dropout;
    None: there is none. carried: see `common.carried`. ready: whether masks and tables were made for x and are in the
    form that layers read. new: whether they may be noted: outside of transforms, where no token is padding.
    """

    masks: Mapping[str, MaskLike]
    freqs_cis: Mapping[str, Tensor]
    valid: Tensor | None
    routing: Tensor | None
    choices: Tensor | None
    cache: CacheStep | None = None
    layer_inputs: Tensor | None = None
    shared: Tree | None = None
    noise: Tensor | None = None
    carried: Mapping[str, Any] = {}
    ready: bool = False
    new: bool = False

    @property
    def reads_beside(self) -> bool:
        """Whether there is something that layers may read beside x and a cache, or a tensor that no layer reads."""
        of_layers = self.routing is not None or self.choices is not None or self.layer_inputs is not None
        return of_layers or self.shared is not None or self.noise is not None or bool(self.carried)


def run_stack(
    params: Tree,
    x: Tensor,
    batch: LayerInputs,
    plan: StackPlan,
    options: ForwardOptions,
    ends: tuple[str, ...] = (),
) -> tuple[Tensor, dict[str, Tensor], dict[int, Entry], tuple[Tensor | None, dict[str, Entry], Tensor | None]]:
    """(x, taps, entries of a cache, what later layers read: the last choice of keys, keys and values, what was left).

    options: those that the plan was made of. ends: the names of edits that are not of layers, which the caller applies.
    """
    layers, wanted, cache = params["layers"], plan.wanted, batch.cache
    tables: Mapping[str, Any] = batch.freqs_cis
    masks: dict[Any, Mapping[str, MaskLike]] = {}
    if batch.ready:
        check_layers(layers, plan.stored)
    else:
        cached = cache is not None
        check_fit(layers, x, batch.masks, batch.freqs_cis, plan.kinds, plan.used, stored=plan.stored, cached=cached)
        tables = ready_tables(batch.freqs_cis, plan.used, options)
        masks = {c: ready_masks(batch.masks, kinds, kernel, options, plan, x) for c, kernel, kinds in plan.chosen}
        if batch.new and not cached:
            note_ready(x, (batch.masks, batch.freqs_cis, batch.valid), (masks, tables), plan, options)
    apart = plan.leaves or (cache is not None and len(plan.layers) != len(plan.kinds))
    beside = LayerSideInputs(batch, x, plan) if plan.reads_beside or batch.reads_beside or apart else None
    run = range(plan.first, plan.first + len(plan.layers))
    edits = edits_of_layers(options.edits, ends, len(plan.kinds), run) if options.edits else {}
    bind = _Binding(cache) if edits or options.layer_fn is not None else None
    of_cache = {} if cache is None else {k: cache.keywords(k, bound=bind is not None) for k in plan.used}
    tapped: dict[str, Tensor] = {}
    entries: dict[int, Entry] = {}
    applied: set[tuple[int, str]] = set()
    for layer in plan.layers:
        index, kind, block = layer.index, layer.kind, layer.block
        tensors = {} if beside is None else beside.tensors(layer)
        if cache is not None:
            tensors = {**tensors, **of_cache[kind], "cache": cache.entries[index]}
        own = edits.get(index, _NO_EDITS)
        x = before = _around("input", x, own) if own else x
        if bind is not None:
            block = bind(layer, options.layer_fn, own, tensors)
        of_choice = masks[layer.choice] if masks else batch.masks
        result = block(layers[layer.stored], x, of_choice[kind], tables[kind], **tensors)
        if not isinstance(result, tuple):
            raise TypeError(
                f"The block of kind {kind!r} returned a {type(result).__name__}; a block, and so what layer_fn makes "
                "of it, returns (x, aux)."
            )
        x, aux = result
        if own:
            x = _around("output", x, own)
            applied |= {(index, name) for name in (*own.keys() & set(AROUND), *aux.get("edited", ()))}
        if beside is not None:
            beside.keep(kind, aux)
        if cache is not None:
            entries[index] = aux.get("cache", {})
        if wanted:
            for name, value in (("input", mean(before)), ("output", mean(x)), *aux.items()):
                if (index, name) in wanted:
                    tapped[f"layers.{index}.{name}"] = value
    if wanted:
        _check_all_passed(plan, tapped)
    if options.edits and (unread := missed(options.edits, applied)):
        raise ValueError(f"Nothing passes the edit {unread[0]!r}. There are {list_of_taps(plan.config)}.")
    return x, tapped, entries, (None, {}, None) if beside is None else (beside.chosen, beside.lent, beside.left)


def _check_all_passed(plan: StackPlan, tapped: Mapping[str, Tensor]) -> None:
    """ValueError for a tap that no layer passed, but for "layers.*.NAME" where only other layers pass it."""
    passed = {(int(name.split(".", 2)[1]), name.split(".", 2)[2]) for name in tapped}
    if unread := missed(plan.taps, passed):
        check_tap_names(plan.config, unread)


class LayerSideInputs:
    """Checks and hands out what layers read beside x: batch tensors, and what earlier layers chose or lent.

    Batch tensors are arguments of the call of a block: bound to it, they would cause a recompile for each batch.
    """

    def __init__(self, batch: LayerInputs, x: Tensor, plan: StackPlan) -> None:
        self.batch, self.plan, self.valid = batch, plan, batch.valid
        self.lent: dict[str, Entry] = dict(batch.carried.get("kv", {}))
        self.chosen: Tensor | None = batch.carried.get("chosen")
        self.left: Tensor | None = batch.carried.get("left")
        if any(layer.expert_row is not None for layer in plan.layers):
            self.valid = valid_tokens(batch.valid, {kind: batch.masks[kind] for kind in plan.used}, x)
        if batch.routing is not None:
            check_routing(batch.routing, x, plan.experts, plan.config)
        if batch.choices is not None:
            check_choices(batch.choices, x, plan.indexers)
        check_layer_inputs(batch.layer_inputs, plan.first, len(plan.kinds), plan.config)
        if function_of(family_of(plan.config), "shared") is not None and batch.shared is None:
            raise ValueError(
                "The layers of this model read tensors of the whole model beside the residual stream: pass shared=, "
                "which the family's function of this name makes of the params and inputs."
            )

    def tensors(self, layer: LayerPlan) -> dict[str, Any]:
        """The keyword tensors of one layer's call."""
        batch = self.batch
        tensors: dict[str, Any] = {}
        if layer.expert_row is not None:
            routing = batch.routing
            tensors["valid"] = self.valid
            tensors["routing"] = None if routing is None else routing[:, :, layer.expert_row]
        if layer.choice_row is not None:
            tensors["choices"] = None if layer.chooses else self.chosen
            if batch.choices is not None:
                tensors["choices"] = batch.choices[:, :, layer.choice_row]
        if batch.layer_inputs is not None:
            tensors["layer_input"] = batch.layer_inputs[:, :, layer.index - len(self.plan.kinds)]
        if batch.shared is not None:
            tensors["shared"] = batch.shared
        if batch.noise is not None:
            index = torch.full((), layer.index, dtype=torch.int64, device=batch.noise.device)
            keys = fold(batch.noise, index)
            tensors["noise"] = Noise(keys, keys, keys, keys, index)
        if layer.lender is not None:
            tensors["kv"] = self._lent(layer, layer.lender)
        if layer.joins:
            if self.left is None:
                raise ValueError(
                    f"Layer {layer.index} reads what layer {layer.index - 1} has left for it, which is not run here: "
                    "run both in one call, or pass `carried` of the layers before."
                )
            tensors["left"] = self.left
        return tensors

    def keep(self, kind: str, aux: Mapping[str, Any]) -> None:
        """Remember what a layer of this kind leaves for later ones: a choice of keys, keys and values, a summand."""
        self.chosen, self.left = aux.get("chosen", self.chosen), aux.get("left")
        if "kv" in aux:
            self.lent[LayerKind.parse(kind).stem] = aux["kv"]

    def _lent(self, layer: LayerPlan, source: str) -> Entry:
        """The keys and values of the last layer of the kind `source`; ValueError if none ran here."""
        if source not in self.lent:
            first = self.plan.first
            raise ValueError(
                f"Layer {layer.index} reads the keys and values of the last layer of kind {source!r}, which is before "
                f"layer {first}, the first that runs here: run both in one call, or pass `carried` of the layers "
                f"before {first}."
            )
        return self.lent[source]


class _Binding:
    """Binds what is of one call to the blocks of a plan: how a cache is used, edits, and layer_fn around them.

    layer_fn is called once per kind, and once more for each set of edits by functions and each choice by layer.
    """

    def __init__(self, cache: CacheStep | None) -> None:
        self.cache = cache
        self.made: dict[Any, Block] = {}

    def __call__(self, layer: LayerPlan, layer_fn: Any, edits: LayerEdits, tensors: dict[str, Any]) -> Block:
        """The block; the tensors of the edits are added to `tensors`, the keywords of its call."""
        within = {tap: edits[tap] for tap in sorted(edits) if tap not in AROUND}
        statics = tuple(edit for edit, _ in within.values())
        if within:
            tensors["edit_tensors"] = {tap: values for tap, (_, values) in within.items()}
        key = layer.kind, layer.choice, statics
        if key not in self.made:
            bound: dict[str, Any] = {} if self.cache is None else {"use": self.cache.use(layer.kind)}
            bound |= {"edits": statics} if statics else {}
            block = functools.partial(layer.block, **bound) if bound else layer.block
            wrap = layer_fn if layer.choice is None else layer.options.layer_fn
            self.made[key] = block if wrap is None else wrap(block)
        return self.made[key]


def _around(tap: str, x: Tensor, edits: LayerEdits) -> Tensor:
    """A layer's input or output, which stand outside of its block, after its edit, which is of the mean of streams."""
    edit, tensors = edits.get(tap, (None, {}))
    return x if edit is None else with_mean(x, edit(mean(x), tensors))

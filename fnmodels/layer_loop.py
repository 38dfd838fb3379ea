"""The loop over the layers of a stack: what each block is given, and what it returns beside x."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from fnmodels.edits import BoundEdit, BoundEdits, edits_of_layers, missed
from fnmodels.inputs.mask import MaskLike, attention_part, with_attention
from fnmodels.inputs.order import Segments
from fnmodels.layer_checks import check_choices, check_fit, check_layer_inputs, check_routing, valid_tokens
from fnmodels.models.common.family import (
    DecoderConfig,
    Family,
    LayerKind,
    field_of,
    function_of,
    is_routed,
    own_choices,
    traits_of,
)
from fnmodels.models.common.registry import family_of
from fnmodels.ops.attention.select import materialize
from fnmodels.ops.moe.layer import MOE_TAPS
from fnmodels.ops.slots import Entry, SlotUse
from fnmodels.options import Block, ForwardOptions
from fnmodels.taps import AROUND, check_tap_names, list_of_taps, wanted_taps
from fnmodels.tree import Tree

LayerEdits = Mapping[str, tuple[BoundEdit, dict[str, Tensor]]]  # by tap of one layer
_NO_EDITS: LayerEdits = {}


@dataclass(frozen=True)
class CacheStep:
    """The part of a cache that layers read and write in one call.

    entries: {layer index: its tensors}. slots: {kind: slot of each new token, int64 [B, S]; C for a token that is not
    written}, for kinds with slots. uses: {kind: how entries are read}, which says what the mask's keys are; by default
    the cached slots, then the new tokens. occupied: {kind: bool [B, C]} where empty slots may hold NaN.
    """

    entries: Mapping[int, Entry]
    slots: Mapping[str, Tensor] = field(default_factory=dict)
    uses: Mapping[str, SlotUse] = field(default_factory=dict)
    occupied: Mapping[str, Tensor] = field(default_factory=dict)

    def tensors(self, index: int, kind: str) -> dict[str, Any]:
        """The keyword tensors of a layer's call."""
        per_kind = {"slots": self.slots, "occupied": self.occupied}
        return {"cache": self.entries[index], **{name: of[kind] for name, of in per_kind.items() if kind in of}}

    def use(self, kind: str) -> SlotUse:
        """How the layers of a kind read their entries."""
        return self.uses.get(kind, SlotUse())


@dataclass(frozen=True)
class LayerInputs:
    """Batch tensors that layers read: masks and tables by kind, valid [B, S], cache; of all layers the others.

    routing: [B, S, MoE layers, k]. choices: [B, S, layers with an indexer, k]. layer_inputs: [B, S, layers, P], or of
    the last layers alone. shared: what every layer reads, see `family.function_of`. carried: see
    `common.carried`.
    """

    masks: Mapping[str, MaskLike]
    freqs_cis: Mapping[str, Tensor]
    valid: Tensor | None
    routing: Tensor | None
    choices: Tensor | None
    cache: CacheStep | None = None
    layer_inputs: Tensor | None = None
    shared: Tree | None = None
    carried: Tree = field(default_factory=dict)


def run_stack(
    params: Tree,
    x: Tensor,
    batch: LayerInputs,
    layers: range,
    config: DecoderConfig,
    taps: tuple[str, ...],
    options: ForwardOptions,
    ends: tuple[str, ...] = (),
) -> tuple[Tensor, dict[str, Tensor], dict[int, Entry], tuple[Tensor | None, dict[str, Entry]]]:
    """(x, taps, entries of a cache, (the last choice of keys, keys and values that were lent)).

    ends: the names of edits that are not of layers, which the caller applies.
    """
    family = family_of(config)
    kinds = family.kinds(config)
    lo, hi, cache = layers.start, layers.stop, batch.cache
    if not 0 <= lo <= hi <= len(kinds):
        raise ValueError(f"lo is {lo} and hi is {hi}, but 0 <= lo <= hi must hold and the model has {len(kinds)}.")
    wanted = wanted_taps(config, taps, len(kinds), layers)
    used, cached = sorted(set(kinds[lo:hi])), cache is not None
    check_fit(params["layers"], x, batch.masks, batch.freqs_cis, kinds, used, cached=cached)
    own_options = {index: options.at(index) for index in layers}
    masks = _masks_by_choice(family, config, batch.masks, kinds, own_options, options, x)
    beside = _BesideX(batch, x, layers, family, config)
    edits = edits_of_layers(options.edits, ends, len(kinds), layers) if options.edits else {}
    bind = _Binding(family, config, tuple(sorted({name for _, name in wanted})), options, cache)
    tapped: dict[str, Tensor] = {}
    entries: dict[int, Entry] = {}
    applied: set[tuple[int, str]] = set()
    for index in layers:
        kind, own, here = kinds[index], own_options[index], edits.get(index, _NO_EDITS)
        x = before = _around("input", x, here)
        block, edit_tensors = bind(kind, own, here)
        mask, freqs = masks[_chosen_by_layer(own, options)][kind], batch.freqs_cis[kind]
        result = block(params["layers"][index], x, mask, freqs, **beside.tensors(index), **edit_tensors)
        if not isinstance(result, tuple):
            raise TypeError(
                f"The block of kind {kind!r} returned a {type(result).__name__}; a block, and so what layer_fn makes "
                "of it, returns (x, aux)."
            )
        x, aux = result
        x = _around("output", x, here)
        beside.keep(kind, aux)
        applied |= {(index, name) for name in (*here.keys() & set(AROUND), *aux.get("edited", ()))}
        if cache is not None:
            entries[index] = aux.get("cache", {})
        for name, value in (("input", before), ("output", x), *aux.items()):
            if (index, name) in wanted:
                tapped[f"layers.{index}.{name}"] = value
    if unread := missed(taps, {(int(name.split(".", 2)[1]), name.split(".", 2)[2]) for name in tapped}):
        check_tap_names(config, unread)
    if options.edits and (unread := missed(options.edits, applied)):
        raise ValueError(f"Nothing passes the edit {unread[0]!r}. There are {list_of_taps(config)}.")
    return x, tapped, entries, (beside.chosen, beside.lent)


class _BesideX:
    """Checks and hands out what layers read beside x: batch tensors, and what earlier layers chose or lent.

    Batch tensors are arguments of the call of a block: bound to it, they would cause a recompile for each batch.
    """

    def __init__(self, batch: LayerInputs, x: Tensor, layers: range, family: Family, config: DecoderConfig) -> None:
        self.batch, self.first, self.kinds = batch, layers.start, family.kinds(config)
        self.sparse = [index for index, kind in enumerate(self.kinds) if is_routed(family, kind)]
        self.indexed = own_choices(self.kinds)
        self.lent: dict[str, Entry] = dict(batch.carried.get("kv", {}))
        self.chosen: Tensor | None = batch.carried.get("chosen")
        self.valid = batch.valid
        if any(index in layers for index in self.sparse):
            used = sorted({self.kinds[index] for index in layers})
            self.valid = valid_tokens(batch.valid, {kind: batch.masks[kind] for kind in used}, x)
        if batch.routing is not None:
            check_routing(batch.routing, x, len(self.sparse), config)
        if batch.choices is not None:
            check_choices(batch.choices, x, len(self.indexed))
        check_layer_inputs(batch.layer_inputs, layers, len(self.kinds), config)
        if function_of(family, "shared") is not None and batch.shared is None:
            raise ValueError(
                "The layers of this model read tensors of the whole model beside the residual stream: pass shared=, "
                "which the family's function of this name makes of the params and inputs."
            )

    def tensors(self, index: int) -> dict[str, Any]:
        """The keyword tensors of one layer's call."""
        batch, kind = self.batch, self.kinds[index]
        found: dict[str, Any] = {} if batch.cache is None else batch.cache.tensors(index, kind)
        if index in self.sparse:
            routing = batch.routing
            chosen = None if routing is None else routing[:, :, self.sparse.index(index)]
            found |= {"valid": self.valid, "routing": chosen}
        if LayerKind.parse(kind).indexed:
            found["choices"] = _choice(index, self.indexed, batch.choices, self.chosen)
        if batch.layer_inputs is not None:
            found["layer_input"] = batch.layer_inputs[:, :, index - len(self.kinds)]
        if batch.shared is not None:
            found["shared"] = batch.shared
        if source := LayerKind.parse(kind).source:
            found["kv"] = _lent(self.lent, source, index, self.first)
        return found

    def keep(self, kind: str, aux: Mapping[str, Any]) -> None:
        """Remember what a layer of this kind leaves for later ones: a choice of keys, its keys and values."""
        self.chosen = aux.get("chosen", self.chosen)
        if "kv" in aux:
            self.lent[kind] = aux["kv"]


def _choice(index: int, indexed: list[int], replay: Tensor | None, chosen: Tensor | None) -> Tensor | None:
    """The keys that a layer takes: of a replay, or for a layer without an indexer those that the last one chose."""
    if replay is not None:
        return replay[:, :, bisect.bisect(indexed, index) - 1]
    return None if index in indexed else chosen


def _lent(lent: Mapping[str, Entry], source: str, index: int, lo: int) -> Entry:
    """The keys and values of the last layer of the kind `source`; ValueError if none ran here."""
    if source not in lent:
        raise ValueError(
            f"Layer {index} reads the keys and values of the last layer of kind {source!r}, which is before layer "
            f"{lo}, the first that runs here: run both in one call, or pass `carried` of the layers before {lo}."
        )
    return lent[source]


def _chosen_by_layer(own: ForwardOptions, options: ForwardOptions) -> tuple[Any, ...] | None:
    """The choice of a `PerLayer` for one layer, as a key; None where there is none."""
    return None if own is options else (own.kernel, own.layer_fn)


def _masks_by_choice(
    family: Family,
    config: DecoderConfig,
    masks: Mapping[str, MaskLike],
    kinds: tuple[str, ...],
    own_options: Mapping[int, ForwardOptions],
    options: ForwardOptions,
    x: Tensor,
) -> dict[Any, dict[str, MaskLike]]:
    """{what a `PerLayer` chose, or None: {kind: mask in the form that this kernel reads}}."""
    kinds_of: dict[Any, tuple[ForwardOptions, set[str]]] = {}
    for index, own in own_options.items():
        kinds_of.setdefault(_chosen_by_layer(own, options), (own, set()))[1].add(kinds[index])
    return {
        choice: _ready_masks(family, config, {kind: masks[kind] for kind in sorted(there)}, x, own)
        for choice, (own, there) in kinds_of.items()
    }


def _ready_masks(
    family: Family, config: DecoderConfig, masks: Mapping[str, MaskLike], x: Tensor, options: ForwardOptions
) -> dict[str, MaskLike]:
    """{kind: mask in the form the kernel reads}, converted once per distinct mask instead of once per layer."""
    softcap, sinks = field_of(config, "attention_softcap"), traits_of(family).sinks
    asks: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "bias": traits_of(family).biased}
    form: Any = functools.partial(materialize, device=x.device, dtype=x.dtype, **asks)
    ready: dict[str, MaskLike] = {}
    for kind, mask in masks.items():
        twin = next(
            (o for o in ready if masks[o] is mask and LayerKind.parse(o).indexed == LayerKind.parse(kind).indexed), None
        )
        if twin is not None:
            ready[kind] = ready[twin]
        elif isinstance(mask, Segments) or LayerKind.parse(kind).indexed:
            ready[kind] = mask  # no kernel reads what depends on order, and a choice of keys needs positions
        else:
            ready[kind] = with_attention(mask, form(attention_part(mask), options.kernel, options.layout))
    return ready


class _Binding:
    """Makes callables (layer, x, mask, freqs, **tensors) -> (x, aux), with only hashable values bound.

    One per kind, and one more for each set of edits by functions and each choice by layer; layer_fn is called once for
    each.
    """

    def __init__(
        self,
        family: Family,
        config: DecoderConfig,
        taps: tuple[str, ...],
        options: ForwardOptions,
        cache: CacheStep | None,
    ) -> None:
        self.family, self.config, self.taps, self.options, self.cache = family, config, taps, options, cache
        self.made: dict[Any, Block] = {}

    def __call__(self, kind: str, own: ForwardOptions, edits: LayerEdits) -> tuple[Block, dict[str, Any]]:
        """(block, the tensors of the edits as a keyword of its call)."""
        within = {tap: edits[tap] for tap in sorted(edits) if tap not in AROUND}
        statics = tuple(edit for edit, _ in within.values())
        key = kind, _chosen_by_layer(own, self.options), statics
        if key not in self.made:
            self.made[key] = self._made(kind, own, statics)
        tensors = {"edit_tensors": {tap: tensors for tap, (_, tensors) in within.items()}} if within else {}
        return self.made[key], tensors

    def _made(self, kind: str, options: ForwardOptions, edits: BoundEdits) -> Block:
        names = AROUND if is_routed(self.family, kind) else (*AROUND, *MOE_TAPS)
        more: dict[str, Any] = {} if self.cache is None else {"use": self.cache.use(kind)}
        more |= {"edits": edits} if edits else {}
        own = tuple(name for name in self.taps if name not in names)
        # Ready masks need no layout, and a bound one would give compiled blocks a graph per layout.
        layout = options.layout if callable(options.kernel) or LayerKind.parse(kind).indexed else None
        bound = functools.partial(
            self.family.block,
            config=self.config,
            kind=kind,
            options=replace(options, layer_fn=None, edits=None, layout=layout),
            taps=own,
            **more,
        )
        return bound if options.layer_fn is None else options.layer_fn(bound)


def _around(tap: str, x: Tensor, edits: LayerEdits) -> Tensor:
    """A layer's input or output, which stand outside of its block, after its edit."""
    edit, tensors = edits.get(tap, (None, {}))
    return x if edit is None else edit(x, tensors)

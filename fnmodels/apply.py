"""The forward pass of every family: `prepare`, `forward`, `hidden` and `run_layers`.

    inputs, masks, freqs_cis = prepare(config, tokens, positions=positions, segment_ids=segment_ids)
    logits = forward(params, inputs, masks, freqs_cis, config=config)

`prepare` runs once per batch, outside of transforms; `forward` is pure and works under vmap, grad, compile and remat.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from fnmodels.edits import BoundEdit, BoundEdits, edit_end, edits_of_layers, missed
from fnmodels.inputs.block_mask import is_block_mask
from fnmodels.inputs.convert import shape_of
from fnmodels.inputs.documents import documents
from fnmodels.inputs.mask import Mask, MaskLike, attention_part, with_attention
from fnmodels.inputs.order import Segments
from fnmodels.inputs.segments import integers
from fnmodels.models.common import decoder
from fnmodels.models.common.heads import PER_DOCUMENT
from fnmodels.models.common.registry import (
    DecoderConfig,
    Family,
    check_fields,
    family_of,
    field_of,
    is_indexed,
    may_have,
    own_choices,
    source_kind,
)
from fnmodels.ops.attention.select import materialize
from fnmodels.ops.invariant import invariant_rows
from fnmodels.ops.moe.layer import MOE_TAPS
from fnmodels.ops.norm import watched_norms
from fnmodels.ops.slots import Entry, SlotUse

from .options import Block, Edit, ForwardKwargs, ForwardOptions
from .run_params import RunParams, with_run
from .taps import AROUND, ENDS, FINAL, tap_names
from .tree import Tree, flatten, leaves


def prepare(
    config: DecoderConfig,
    tokens: Tensor,
    *,
    positions: Tensor | None = None,
    segment_ids: Tensor | None = None,
    length: int | Tensor | None = None,
    token_types: Tensor | None = None,
) -> tuple[dict[str, Any], dict[str, MaskLike], dict[str, Tensor]]:
    """(inputs, masks, freqs_cis) of one batch, each with batch dimension B.

    tokens: [B, S] ids, or embeddings [B, S, D].
    segment_ids: [B, S], documents from 1, padding 0 or less; by default each row is one document without padding.
    positions: [B, S]; by default each row's document is numbered from 0, and a row with several documents raises
        ValueError. [B, S, 3], or [B, S, 4] with the order in the document first, only for a model whose rotary tables
        have several axes; [B, S, 4] of another meaning for a vision tower, see `fnmodels.models.common.vision`. Any
        integer dtype; made int64.
    length: the sequence length that length-dependent rotary scalings read, see `fnmodels.ops.rotary`.
    token_types: [B, S], for an encoder that has embeddings of them; 0 by default.

    For a head with one result per document, inputs["documents"] are those of `fnmodels.documents`, which reads values.
    """
    if isinstance(config, Tensor) or not isinstance(tokens, Tensor):
        raise TypeError(
            f"prepare takes the config first and then tokens, a tensor [B, S]; it got a {type(config).__name__} and a "
            f"{type(tokens).__name__}."
        )
    if tokens.ndim not in (2, 3):
        raise ValueError(f"tokens must be [B, S] (or vectors [B, S, D]), not of shape {tuple(tokens.shape)}.")
    shape = tokens.shape[:2]
    if positions is not None:
        axes = positions.shape[2:] if positions.ndim == 3 else ()
        positions = _per_token("positions", positions, shape + axes)
    if segment_ids is not None:
        segment_ids = _per_token("segment_ids", segment_ids, shape)
        positions = _positions(segment_ids) if positions is None else positions
    else:  # reads no tensor values: works on meta tensors and never synchronizes with the device
        segment_ids = torch.ones((1, 1), dtype=torch.long, device=tokens.device).expand(shape)
        if positions is None:
            positions = torch.arange(shape[1], device=tokens.device).expand(shape)
    family = family_of(config)
    if may_have(family, "INPUTS") == "latents":
        raise ValueError("This model denoises latents, given texts: take fnmodels.prepare_denoising.")
    check_fields(config)
    if may_have(family, "stacks")(config):
        raise ValueError(
            "This model has an encoder and a decoder, each with its own tokens: take fnmodels.prepare_pair."
        )
    inputs: dict[str, Any] = {"tokens": tokens, "positions": positions, "valid": segment_ids > 0}
    if token_types is not None:
        inputs["token_types"] = _per_token("token_types", token_types, shape)
    if field_of(config, "head") in PER_DOCUMENT:
        inputs["documents"] = documents(segment_ids, positions)
    if field_of(config, "hidden_size_per_layer_input") and not tokens.is_floating_point():
        inputs["token_ids"] = tokens  # which layers embed, also where "tokens" is replaced by embeddings
    masks = family.attention_masks(config, positions, segment_ids)
    inputs |= may_have(family, "batch_inputs")(config, positions)
    return inputs, masks, family.freqs_cis(config, positions, length=length)


def _per_token(name: str, given: Tensor, shape: torch.Size) -> Tensor:
    """Broadcasts a per-token tensor of shape [B, S, ...] or [1, S, ...] to `shape`."""
    if given.shape not in (shape, (1, *shape[1:])):
        raise ValueError(f"{name} must be [B, S] = {list(shape[:2])} like the tokens, not {list(given.shape)}.")
    return integers(name, given).expand(shape)


def _positions(segment_ids: Tensor) -> Tensor:
    valid = segment_ids > 0
    highest = segment_ids.amax(dim=1, keepdim=True) if segment_ids.shape[1] else segment_ids.new_zeros(1, 1)
    several = (valid & (segment_ids != highest)).any(dim=1)
    if several.any():
        row = int(several.nonzero()[0])
        raise ValueError(
            f"Row {row} holds several documents, so their positions must be given: "
            "fnmodels.positions_from_segments(segment_ids) numbers each from 0."
        )
    # The first token of the document has position 0, whatever padding is to its left.
    before = valid.int().cumsum(dim=1).eq(0).sum(dim=1, keepdim=True)
    return (torch.arange(segment_ids.shape[1], device=segment_ids.device) - before).clamp(min=0)


def forward(
    params: Tree,
    inputs: Tree,
    masks: Mapping[str, MaskLike],
    freqs_cis: Mapping[str, Tensor],
    /,
    *,
    config: DecoderConfig,
    taps: tuple[str, ...] = (),
    **options: Unpack[ForwardKwargs],
) -> Any:
    """Logits [B, S, V]; with taps (logits, {name: tensor}). The config's head may return another shape: see
    `fnmodels.models.common.heads`.

    params: the tree of `family.spec(config)`.
    inputs: those of `prepare`, or token ids [B, S], or embeddings [B, S, D]. A mixture-of-experts model needs those of
        `prepare`: it reads the padding mask "valid" and, where present, "routing", int64 [B, S, number of MoE layers,
        k], the expert indices that replace the router's choice. In models whose attention chooses its keys, "choices",
        int64 [B, S, number of layers with an indexer, k], replaces that choice; see `fnmodels.ops.indexer`.
    masks, freqs_cis: {kind: ...} for each kind of layer.
    taps: activations to return, by the names that `fnmodels.tap_names(config)` lists, such as "embed",
        "layers.3.attention.q" or "final.norm"; "layers.*.attention" returns it for all layers that have it.
    options: kernel, layout, layer_fn, experts, context and edits, see `fnmodels.options.ForwardOptions`. MoE blocks
        also get the keywords `valid` and `routing`, those that choose keys `choices`, and edited ones `edit_tensors`,
        which a layer_fn must pass on.

    Raises ValueError for arguments that do not fit each other and for an unknown tap.
    """
    try:
        if stacks := may_have(family_of(config), "stacks")(config):
            return _through_stacks(params, inputs, masks, freqs_cis, stacks, taps, options)
        given = ForwardOptions(**options)
        _check_tuple(taps)
        final, edits = tuple(tap for tap in taps if tap in FINAL), given.edits or {}
        within = replace(given, edits={name: edit for name, edit in edits.items() if name not in FINAL} or None)
        own = tuple(tap for tap in taps if tap not in FINAL)
        x, tapped, _ = _hidden(params, inputs, masks, freqs_cis, config, own, within)
        ends: dict[str, Tensor] = {}
        with invariant_rows(given.invariant):
            if (outputs := may_have(family_of(config), "outputs")) is not None:
                _refuse_final(config, final, edits)
                logits = outputs(params, x, inputs, config=config)
            elif field_of(config, "head") in PER_DOCUMENT:
                logits = _per_document(params, inputs, x, config, final, edits)
            else:
                logits, ends = unembedded(params, x, config, final, edits)
    except KeyError as error:
        _name_missing_leaf(params, config, error)
        raise
    return (logits, tapped | ends) if taps else logits


def _through_stacks(
    params: Tree,
    inputs: Tree,
    masks: Mapping[str, Any],
    freqs_cis: Mapping[str, Any],
    stacks: Mapping[str, Any],
    taps: tuple[str, ...],
    options: Mapping[str, Any],
) -> Tensor:
    """Logits [B, S, V] of the decoder, whose layers read what the encoder returns; see `fnmodels.pairs`."""
    if taps or options.get("edits"):
        raise ValueError(
            "Taps and edits are of one stack: run fnmodels.stack_params(params, name) with config.encoder, and then "
            'config.decoder with the encoder\'s result as inputs["memory"].'
        )
    layouts, rest = options.get("layout"), {name: value for name, value in options.items() if name != "layout"}
    if layouts is not None and not isinstance(layouts, Mapping):
        raise TypeError(
            'layout is of one stack; here it is {"encoder": ..., "decoder": ...}, either of which may be None.'
        )
    memory: Tensor | None = None
    for name, config in stacks.items():
        given = inputs[name] if memory is None else {**inputs[name], "memory": memory, "memory_mask": masks["cross"]}
        rest["layout"] = None if layouts is None else layouts.get(name)
        memory = forward(stack_params(params, name), given, masks[name], freqs_cis[name], config=config, **rest)
    assert memory is not None
    return memory


def stack_params(params: Tree, name: str) -> Tree:
    """The params of the "encoder" or the "decoder" of a model of both, for `forward` with that stack's config."""
    shared = {key: value for key, value in params.items() if key not in ("encoder", "decoder")}
    return with_run(params, shared | params[name])


def unembedded(
    params: Tree, x: Tensor, config: DecoderConfig, taps: tuple[str, ...], edits: Mapping[str, Edit]
) -> tuple[Tensor, dict[str, Tensor]]:
    """(logits [B, S, V], taps) of hidden states x [B, S, D]: the final norm and the head. taps, edits: of FINAL."""
    if not taps and not any(name in edits for name in FINAL):
        return decoder.scores(params, x, config=config), {}
    if "norm" not in params:
        raise ValueError(f"This model has no final norm, so it has no {' and no '.join(FINAL)}.")
    tapped: dict[str, Tensor] = {}

    def tap(name: str, value: Tensor) -> Tensor:
        tapped[name] = edit_end(edits, name, value)
        return tapped[name]

    with watched_norms({FINAL[0]: params["norm"]}, tap):
        logits = decoder.scores(params, x, config=config)
    return logits, {name: tapped[name] for name in taps}


def _refuse_final(config: Any, taps: tuple[str, ...], edits: Mapping[str, Edit]) -> None:
    if unread := [*taps, *(name for name in FINAL if name in edits)]:
        raise ValueError(f"A {config.model_type} has no {unread[0]!r}: what its last norm returns has no weight.")


def _per_document(
    params: Tree, inputs: Tree, x: Tensor, config: Any, taps: tuple[str, ...], edits: Mapping[str, Edit]
) -> Tensor:
    """Logits [N, labels] of hidden states x [B, S, D]: one row per document. ValueError for taps and edits of FINAL."""
    if not isinstance(inputs, Mapping) or "documents" not in inputs:
        raise ValueError(
            f"The head {config.head!r} returns one row per document: pass the inputs that fnmodels.prepare returns, "
            'which hold "documents".'
        )
    if unread := [*taps, *(name for name in FINAL if name in edits)]:
        raise ValueError(f"{unread[0]!r} is of each token, but the head {config.head!r} reads one token per document.")
    classify = may_have(family_of(config), "classify") or decoder.classify
    logits: Tensor = classify(params, x, inputs["documents"], config=config)
    return logits


def hidden(
    params: Tree,
    inputs: Tree,
    masks: Mapping[str, MaskLike],
    freqs_cis: Mapping[str, Tensor],
    /,
    *,
    config: DecoderConfig,
    taps: tuple[str, ...] = (),
    cache: CacheStep | None = None,
    **options: Unpack[ForwardKwargs],
) -> Any:
    """The final hidden states [B, S, D], before the final norm (part of `family.unembed`). Arguments: see `forward`.

    With cache, which `fnmodels.cache` makes, {layer index: new entry} is returned beside them, last.
    """
    try:
        x, tapped, entries = _hidden(params, inputs, masks, freqs_cis, config, taps, ForwardOptions(**options), cache)
    except KeyError as error:
        _name_missing_leaf(params, config, error)
        raise
    return _returned(x, tapped, entries, taps, cache)


def _returned(
    x: Tensor, tapped: dict[str, Tensor], entries: dict[int, Entry], taps: tuple[str, ...], cache: Any
) -> Any:
    found = (x, *([tapped] if taps else []), *([] if cache is None else [entries]))
    return found if len(found) > 1 else x


def _name_missing_leaf(params: Tree, config: DecoderConfig, error: KeyError) -> None:
    """Raises ValueError that names a parameter of the spec that `params` lacks; returns if none is missing."""
    missing = flatten(family_of(config).spec(config)).keys() - flatten(params).keys()
    if missing:
        raise ValueError(
            f"params has no {min(missing)!r}, which the {type(config).__module__}.spec of this config has"
            + (f", and lacks {len(missing) - 1} more of its leaves." if len(missing) > 1 else ".")
        ) from error


def _hidden(
    params: Tree,
    inputs: Tree,
    masks: Mapping[str, MaskLike],
    freqs_cis: Mapping[str, Tensor],
    config: DecoderConfig,
    taps: tuple[str, ...],
    options: ForwardOptions,
    cache: CacheStep | None = None,
) -> tuple[Tensor, dict[str, Tensor], dict[int, Entry]]:
    if isinstance(params, RunParams):
        if cache is None:
            return (*params.run.hidden(params, inputs, masks, freqs_cis, config, taps, options), {})
        options = params.run.adapted(options, masks)
    family = family_of(config)
    given = inputs if isinstance(inputs, Mapping) else {}
    valid, routing, choices = (given.get(name) for name in ("valid", "routing", "choices"))
    kinds = family.kinds(config)
    if valid is None and any(_sparse(family, kind) for kind in kinds):
        raise ValueError(
            "The model has layers with experts, which must know what is padding: pass the inputs that "
            'fnmodels.prepare returns, which hold "valid" [B, S], instead of bare tokens or vectors.'
        )
    scope = functools.partial(invariant_rows, options.invariant)
    with scope():
        x = family.embed(params, inputs, config=config)
    if x.ndim != 3:
        raise ValueError(
            f"The embedded inputs are {list(x.shape)}, not [B, S, D]: the batch dimension is missing. Under vmap pass "
            "fnmodels.rows(batch), in which every row is a batch of one."
        )
    x = _cleared(edit_end(options.edits, "embed", x), valid)
    _check_tuple(taps)
    in_layers = tuple(tap for tap in taps if tap.startswith("layers."))
    ends = {"embed": x}
    extra, shared = None, may_have(family, "shared")
    with scope():
        if field_of(config, "hidden_size_per_layer_input"):
            extra = _cleared(may_have(family, "layer_inputs")(params, inputs, x, config=config), valid)
        common = None if shared is None else shared(params, given, config=config)
    batch = _Batch(masks, freqs_cis, valid, routing, choices, cache, extra, common)
    for tap in taps:
        if tap not in ENDS and tap not in in_layers:
            why = "; only forward, prefill and decode pass it" if tap in FINAL else ""
            raise ValueError(f"The tap {tap!r} is unknown here{why}. There are {_listed(config)}.")
    x, tapped, entries = _run(params, x, batch, range(len(kinds)), config, in_layers, options, ends=ENDS)
    ends["hidden"] = x = edit_end(options.edits, "hidden", x)
    return x, tapped | {name: ends[name] for name in ENDS if name in taps}, entries


def run_layers(
    params: Tree,
    x: Tensor,
    masks: Mapping[str, MaskLike],
    freqs_cis: Mapping[str, Tensor],
    lo: int,
    hi: int,
    /,
    *,
    config: DecoderConfig,
    valid: Tensor | None = None,
    routing: Tensor | None = None,
    choices: Tensor | None = None,
    layer_inputs: Tensor | None = None,
    shared: Tree | None = None,
    taps: tuple[str, ...] = (),
    cache: Mapping[int, Entry] | CacheStep | None = None,
    **options: Unpack[ForwardKwargs],
) -> Any:
    """Runs layers lo <= i < hi on x [B, S, D], as a pipeline stage does; returns x, or (x, taps) with taps.

    With cache, {layer index: entry} or a `CacheStep` of these layers, {layer index: new entry} is returned too, last.

    params: needs only "layers": the list of all layers, or a stage's {layer index: layer}.
    valid: [B, S] bool, False at padding; by default taken from `masks` where these are `Mask`s. Padding of x is set to
        zero before layer 0, as in `forward`, and MoE layers do not route it.
    routing, choices: those of the full model. taps, options: as in `forward`.
    layer_inputs: [B, S, layers of the full model, P], what the family's function of this name returns, for a config
        with hidden_size_per_layer_input.
    shared: what the family's function of this name returns, where it has one.

    ValueError for a layer that reads keys and values of an earlier one which is not run here.
    """
    if lo == 0:  # not in later stages: their input is finite already, and they match the full model bit for bit
        x = _cleared(x, _said_by(masks, x) if valid is None else valid)
    step = CacheStep(cache) if isinstance(cache, Mapping) else cache
    batch = _Batch(masks, freqs_cis, valid, routing, choices, step, layer_inputs, shared)
    how = ForwardOptions(**options)
    if isinstance(params, RunParams):
        how = params.run.adapted(how, masks)
    x, tapped, entries = _run(params, x, batch, range(lo, hi), config, taps, how)
    return _returned(x, tapped, entries, taps, cache)


@dataclass(frozen=True)
class CacheStep:
    """What layers read and write of a cache in one call.

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
class _Batch:
    """Batch tensors that layers read: masks and tables by kind, valid [B, S], cache; of all layers the others.

    routing: [B, S, MoE layers, k]. choices: [B, S, layers with an indexer, k]. layer_inputs: [B, S, layers, P].
    shared: what every layer reads, see `registry.FAMILY_DEFAULTS`.
    """

    masks: Mapping[str, MaskLike]
    freqs_cis: Mapping[str, Tensor]
    valid: Tensor | None
    routing: Tensor | None
    choices: Tensor | None
    cache: CacheStep | None = None
    layer_inputs: Tensor | None = None
    shared: Tree | None = None


def _run(
    params: Tree,
    x: Tensor,
    batch: _Batch,
    layers: range,
    config: DecoderConfig,
    taps: tuple[str, ...],
    options: ForwardOptions,
    ends: tuple[str, ...] = (),
) -> tuple[Tensor, dict[str, Tensor], dict[int, Entry]]:
    """ends: the names of edits that are not of layers, which the caller applies."""
    family = family_of(config)
    kinds = family.kinds(config)
    lo, hi = layers.start, layers.stop
    if not 0 <= lo <= hi <= len(kinds):
        raise ValueError(f"lo is {lo} and hi is {hi}, but 0 <= lo <= hi must hold and the model has {len(kinds)}.")
    wanted = _wanted_taps(config, taps, len(kinds), layers)
    used = sorted(set(kinds[lo:hi]))
    masks, freqs_cis, cache = batch.masks, batch.freqs_cis, batch.cache
    _check_fit(params["layers"], x, masks, freqs_cis, kinds, used, cached=cache is not None)
    ready = _ready_masks(family, config, {kind: masks[kind] for kind in used}, x, options)
    sparse = [index for index, kind in enumerate(kinds) if _sparse(family, kind)]
    valid, routing = batch.valid, batch.routing
    if any(lo <= index < hi for index in sparse):
        valid = _valid(valid, {kind: masks[kind] for kind in used}, x)
    if routing is not None:
        _check_routing(routing, x, len(sparse), config)
    indexed = own_choices(kinds)
    if batch.choices is not None:
        _check_choices(batch.choices, x, len(indexed))
    edits = edits_of_layers(options.edits, ends, len(kinds), layers) if options.edits else {}
    bind = _Binding(family, config, tuple(sorted({name for _, name in wanted})), options, cache)
    if field_of(config, "hidden_size_per_layer_input") and batch.layer_inputs is None:
        raise ValueError(
            "Each layer of this model reads embeddings of the token ids beside the residual stream: pass layer_inputs "
            "[B, S, layers, P], which the family's function of this name computes."
        )
    if may_have(family, "shared") is not None and batch.shared is None:
        raise ValueError(
            "The layers of this model read tensors of the whole model beside the residual stream: pass shared=, which "
            "the family's function of this name makes of the params and inputs."
        )
    lent: dict[str, Entry] = {}
    tapped: dict[str, Tensor] = {}
    entries: dict[int, Entry] = {}
    chosen: Tensor | None = None
    applied: set[tuple[int, str]] = set()
    for index in range(lo, hi):
        here = edits.get(index, _NO_EDITS)
        x = _around("input", x, here)
        kind, before = kinds[index], x
        # Batch tensors are call arguments: bound to the block, they would cause a recompile for each batch.
        tensors: dict[str, Any] = {} if cache is None else cache.tensors(index, kind)
        if index in sparse:
            tensors |= {"valid": valid, "routing": None if routing is None else routing[:, :, sparse.index(index)]}
        if is_indexed(kind):
            tensors["choices"] = _choice(index, indexed, batch.choices, chosen)
        if batch.layer_inputs is not None:
            tensors["layer_input"] = batch.layer_inputs[:, :, index]
        if batch.shared is not None:
            tensors["shared"] = batch.shared
        if source := source_kind(kind):
            tensors["kv"] = _lent(lent, source, index, lo)
        block, own = bind(kind, here)
        result = block(params["layers"][index], x, ready[kind], freqs_cis[kind], **tensors, **own)
        if not isinstance(result, tuple):
            raise TypeError(
                f"The block of kind {kind!r} returned a {type(result).__name__}; a block, and so what layer_fn makes "
                "of it, returns (x, aux)."
            )
        x, aux = result
        x = _around("output", x, here)
        applied |= {(index, name) for name in (*here.keys() & set(AROUND), *aux.get("edited", ()))}
        if cache is not None:
            entries[index] = aux.get("cache", {})
        chosen = aux.get("chosen", chosen)
        if "kv" in aux:
            lent[kind] = aux["kv"]
        for name, value in (("input", before), ("output", x), *aux.items()):
            if (index, name) in wanted:
                tapped[f"layers.{index}.{name}"] = value
    if unread := missed(taps, {(int(name.split(".", 2)[1]), name.split(".", 2)[2]) for name in tapped}):
        _check_known(config, unread)
    if options.edits and (unread := missed(options.edits, applied)):
        raise ValueError(f"Nothing passes the edit {unread[0]!r}. There are {_listed(config)}.")
    return x, tapped, entries


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
            f"{lo}, the first that runs here: one call must run both."
        )
    return lent[source]


def _ready_masks(
    family: Family, config: DecoderConfig, masks: Mapping[str, MaskLike], x: Tensor, options: ForwardOptions
) -> dict[str, MaskLike]:
    """{kind: mask in the form the kernel reads}, converted once per distinct mask instead of once per layer."""
    softcap, sinks = field_of(config, "attention_softcap"), may_have(family, "SINKS")
    asks: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "bias": may_have(family, "BIASED")}
    form: Any = functools.partial(materialize, device=x.device, dtype=x.dtype, **asks)
    ready: dict[str, MaskLike] = {}
    for kind, mask in masks.items():
        if options.invariant and is_indexed(kind):
            raise NotImplementedError(
                f'kernel="invariant" has no form of {kind!r} layers: the scores by which they choose keys have other '
                "last bits in other batches. Take another kernel."
            )
        twin = next((o for o in ready if masks[o] is mask and is_indexed(o) == is_indexed(kind)), None)
        if twin is not None:
            ready[kind] = ready[twin]
        elif isinstance(mask, Segments) or is_indexed(kind):
            ready[kind] = mask  # no kernel reads what depends on order, and a choice of keys needs positions
        else:
            ready[kind] = with_attention(mask, form(attention_part(mask), options.kernel, options.layout))
    return ready


LayerEdits = Mapping[str, tuple[BoundEdit, dict[str, Tensor]]]  # by tap of one layer
_NO_EDITS: LayerEdits = {}


class _Binding:
    """Makes callables (layer, x, mask, freqs, **tensors) -> (x, aux), with only hashable values bound.

    One per kind, and one more for each set of edits by functions; layer_fn is called once for each.
    """

    def __init__(
        self,
        family: Family,
        config: DecoderConfig,
        taps: tuple[str, ...],
        options: ForwardOptions,
        cache: CacheStep | None,
    ) -> None:
        self.family, self.config, self.taps, self.cache, self.layer_fn = family, config, taps, cache, options.layer_fn
        self.options = replace(options, layer_fn=None, edits=None)
        self.made: dict[Any, Block] = {}

    def __call__(self, kind: str, edits: LayerEdits) -> tuple[Block, dict[str, Any]]:
        """(block, the tensors of the edits as a keyword of its call)."""
        within = {tap: edits[tap] for tap in sorted(edits) if tap not in AROUND}
        statics = tuple(edit for edit, _ in within.values())
        if (kind, statics) not in self.made:
            self.made[kind, statics] = self._made(kind, statics)
        tensors = {"edit_tensors": {tap: tensors for tap, (_, tensors) in within.items()}} if within else {}
        return self.made[kind, statics], tensors

    def _made(self, kind: str, edits: BoundEdits) -> Block:
        names = AROUND if _sparse(self.family, kind) else (*AROUND, *MOE_TAPS)
        more: dict[str, Any] = {} if self.cache is None else {"use": self.cache.use(kind)}
        more |= {"edits": edits} if edits else {}
        own = tuple(name for name in self.taps if name not in names)
        bound = functools.partial(
            self.family.block, config=self.config, kind=kind, options=self.options, taps=own, **more
        )
        return bound if self.layer_fn is None else self.layer_fn(bound)


def _around(tap: str, x: Tensor, edits: LayerEdits) -> Tensor:
    """A layer's input or output, which stand outside of its block, after its edit."""
    edit, tensors = edits.get(tap, (None, {}))
    return x if edit is None else edit(x, tensors)


def _sparse(family: Family, kind: str) -> bool:
    """Whether layers of this kind are MoE layers: in a ROUTED family, kinds that end in "_moe"."""
    return may_have(family, "ROUTED") and kind.endswith("_moe")


def _cleared(x: Tensor, valid: Tensor | None) -> Tensor:
    """x [B, S, ...] with zeros at padding, if `valid` is given: a masked key has weight 0, but 0 times NaN is NaN."""
    if valid is None:
        return x
    if valid.shape != x.shape[:2] or valid.dtype != torch.bool:
        raise ValueError(
            f"valid must be bool {list(x.shape[:2])} like the tokens, not {str(valid.dtype).removeprefix('torch.')} "
            f"{list(valid.shape)}."
        )
    return x.where(valid.reshape(*valid.shape, *[1] * (x.ndim - 2)), 0)


def _said_by(masks: Mapping[str, MaskLike], x: Tensor) -> Tensor | None:
    """[B, S] bool, False at padding, from the first `Mask` or `Segments` that fits x; None if there is none."""
    for mask in map(attention_part, masks.values()):
        ids = mask.q_segments if isinstance(mask, Mask) else mask.segment_ids if isinstance(mask, Segments) else None
        if ids is not None and ids.shape in (x.shape[:2], (1, x.shape[1])):
            return (ids > 0).expand(x.shape[:2])
    return None


def _valid(valid: Tensor | None, masks: Mapping[str, MaskLike], x: Tensor) -> Tensor:
    """[B, S] bool: `valid` if given, else taken from the masks; ValueError if neither has it."""
    found = _said_by(masks, x) if valid is None else valid
    if found is None:
        raise ValueError(
            "These layers have experts, which must know what is padding, and the masks do not say it: pass `valid` "
            '[B, S], which fnmodels.prepare returns as inputs["valid"].'
        )
    return found


def _check_routing(routing: Tensor, x: Tensor, sparse: int, config: DecoderConfig) -> None:
    chosen = field_of(config, "num_experts_per_tok") if sparse else 0
    if routing.shape != (*x.shape[:2], sparse, chosen) or routing.dtype != torch.int64:
        raise ValueError(
            f"routing must be int64 [B, S, layers with experts, experts of a token] = "
            f"{[*x.shape[:2], sparse, chosen]}, not {str(routing.dtype).removeprefix('torch.')} {list(routing.shape)}."
        )


def _check_choices(choices: Tensor, x: Tensor, layers: int) -> None:
    if choices.ndim != 4 or choices.shape[:3] != (*x.shape[:2], layers) or choices.dtype != torch.int64:
        raise ValueError(
            f"choices must be int64 [B, S, layers with an indexer, keys of a query] = {[*x.shape[:2], layers]} and the "
            f"keys, not {str(choices.dtype).removeprefix('torch.')} {list(choices.shape)}."
        )


def _check_fit(
    layers: Tree,
    x: Tensor,
    masks: Mapping[str, MaskLike],
    freqs_cis: Mapping[str, Tensor],
    kinds: tuple[str, ...],
    used: list[str],
    *,
    cached: bool,
) -> None:
    """Raises for mismatched arguments that would fail deep inside a block or be broadcast or ignored silently."""
    for name, given in (("masks", masks), ("freqs_cis", freqs_cis)):
        if not isinstance(given, Mapping):
            raise TypeError(
                f"{name} must be {{kind: ...}}, as fnmodels.prepare returns it, not a {type(given).__name__}."
            )
    if isinstance(layers, (list, tuple)) and len(layers) != len(kinds):
        raise ValueError(f"params has {len(layers)} layers, but the config has {len(kinds)}.")
    for kind in used:
        if kind not in masks or kind not in freqs_cis:
            raise ValueError(
                f"The model has {kind!r} layers, but masks has {sorted(masks)} and freqs_cis {sorted(freqs_cis)}."
            )
        if not cached:  # attention checks the masks of steps, whose keys are not the tokens of x
            _check_mask(kind, attention_part(masks[kind]), x)
        for table in leaves(freqs_cis[kind]):
            if table.shape[1] != x.shape[1] or table.shape[0] not in (1, x.shape[0]):
                raise ValueError(
                    f"freqs_cis[{kind!r}] is made for {list(table.shape[:2])} tokens [B, S], x has {list(x.shape[:2])}."
                )


def _check_mask(kind: str, mask: MaskLike, x: Tensor) -> None:
    if not isinstance(mask, Mask | Segments | Tensor) and not is_block_mask(mask):
        raise TypeError(
            f"masks[{kind!r}] is a {type(mask).__name__}; a mask is a fnmodels.Mask, a bool tensor or a BlockMask."
        )
    rows, _, queries, keys = shape_of(mask)
    if queries != x.shape[1] or keys != x.shape[1]:
        raise ValueError(
            f"masks[{kind!r}] is made for {queries} queries and {keys} keys, but x has {x.shape[1]} tokens."
        )
    if rows != x.shape[0] and rows != 1:
        raise ValueError(f"masks[{kind!r}] is made for {rows} rows, but x has {x.shape[0]}.")


def _check_tuple(taps: tuple[str, ...]) -> None:
    if isinstance(taps, str):
        raise TypeError(f"taps is the string {taps!r}; it is a tuple of names: taps=({taps!r},).")


def _listed(config: DecoderConfig) -> str:
    """The names of taps, for errors."""
    inner = [name.split(".", 2)[2] for name in tap_names(config) if name.startswith("layers.")]
    ends = ", ".join((*ENDS, *FINAL))
    return f"{ends}, and layers.N.NAME (N a layer or *) with NAME one of {', '.join(dict.fromkeys(inner))}"


def _check_known(config: DecoderConfig, unread: list[str]) -> None:
    """ValueError for a tap that was not passed, but for "layers.*.NAME" where only other layers pass it."""
    names = tap_names(config)
    elsewhere = {name.split(".", 2)[2] for name in names if name.startswith("layers.")}
    for tap in unread:
        number, name = tap.split(".", 2)[1:]
        if number != "*" or name not in elsewhere:
            where = f"unknown in layer {number}" if name in elsewhere else "unknown"
            raise ValueError(f"The tap {tap!r} is {where}. There are {_listed(config)}.")


def _wanted_taps(config: DecoderConfig, taps: tuple[str, ...], layers: int, run: range) -> frozenset[tuple[int, str]]:
    _check_tuple(taps)
    wanted = set()
    for tap in taps:
        head, _, rest = tap.partition(".")
        number, _, name = rest.partition(".")
        if head != "layers" or not name or not (number == "*" or (number.isdigit() and int(number) < layers)):
            raise ValueError(f"The tap {tap!r} is unknown; there are {_listed(config)}, and {layers} layers.")
        if number != "*" and int(number) not in run:
            raise ValueError(f"The tap {tap!r} is outside of layers {run.start} to {run.stop - 1}, which are run here.")
        wanted |= {(i, name) for i in (run if number == "*" else [int(number)])}
    return frozenset(wanted)

"""The forward pass of every family: `prepare`, `forward`, `hidden` and `run_layers`.

    inputs, masks, freqs_cis = prepare(config, tokens, positions=positions, segment_ids=segment_ids)
    logits = forward(params, inputs, masks, freqs_cis, config=config)

`prepare` runs once per batch, outside of transforms; `forward` is pure and works under vmap, grad, compile and remat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

from torch import Tensor

from fnmodels.edits import edit_end
from fnmodels.inputs.mask import MaskLike
from fnmodels.models.common.carried import left_for
from fnmodels.models.common.family import DecoderConfig, field_of, function_of
from fnmodels.models.common.heads import PER_DOCUMENT
from fnmodels.models.common.registry import family_of, refuse_towers
from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.ops.slots import Entry
from fnmodels.ops.torch_internals import is_outermost, needs_second_order
from fnmodels.preparation import prepare
from fnmodels.stack.checks import cleared, valid_of_masks
from fnmodels.stack.loop import CacheStep, LayerInputs, run_stack
from fnmodels.stack.plan import plan_stack
from fnmodels.stack.ready import noted

from .noise import embedded, noise_of, with_final_dropout
from .options import USUAL, ForwardKwargs, ForwardOptions
from .run_params import RunParams, with_run
from .taps import ENDS, FINAL, check_taps_tuple, list_of_taps
from .tree import Tree, flatten
from .unembedding import per_document, refuse_final, unembedded

__all__ = ["CacheStep", "forward", "hidden", "prepare", "run_layers", "stack_params"]


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
    """Runs a model: a pure function of its parameters and of what `prepare` makes.

    Args:
        params: The tree of `family.spec(config)`.
        inputs: Those of `prepare`, or token ids [B, S], or embeddings [B, S, D]. A mixture-of-experts model needs those
            of `prepare`: it reads the padding mask "valid" and, where present, "routing", int64 [B, S, number of MoE
            layers, k], the expert indices that replace the router's choice. "rng" [B, S], keys of noise, turns the
            config's dropout on. In models whose attention chooses its keys, "choices", int64 [B, S, number of layers
            with an indexer, k], replaces that choice; see `fnmodels.ops.indexer`.
        masks: {kind: mask} for each kind of layer, of `prepare`.
        freqs_cis: {kind: rotary table}, fp32 [B, S, R/2, 2] with (cos, sin) last, of `prepare`.
        config: The model's config.
        taps: Activations to return, by the names that `fnmodels.tap_names(config)` lists, such as "embed",
            "layers.3.attention.q" or "final.norm"; "layers.*.attention" returns it for all layers that have it.
        **options: kernel, layout, layer_fn, experts, context and edits, see `fnmodels.options.ForwardOptions`. MoE
            blocks also get the keywords `valid` and `routing`, those that choose keys `choices`, and edited ones
            `edit_tensors`, which a layer_fn must pass on.

    Returns:
        Logits [B, S, V]; with taps (logits, {name: tensor}). The config's head may return another shape: see
        `fnmodels.models.common.heads`.

    Raises:
        ValueError: Arguments do not fit each other, or a tap is unknown.
    """
    try:
        family = family_of(config)
        if stacks := function_of(family, "stacks")(config):
            return _through_stacks(params, inputs, masks, freqs_cis, config, stacks, taps, options)
        given = ForwardOptions(**options) if options else USUAL
        within, own, final = given, taps, taps
        if taps != ():
            check_taps_tuple(taps)
            own, final = (tuple(tap for tap in taps if (tap in FINAL) is at_end) for at_end in (False, True))
        if edits := with_final_dropout(given.edits or {}, inputs, config):
            within = replace(given, edits={name: edit for name, edit in edits.items() if name not in FINAL} or None)
        x, tapped, _ = hidden_states(params, inputs, masks, freqs_cis, config, within, own)
        ends: dict[str, Tensor] = {}
        with invariant_rows(given.invariant):
            if (outputs := function_of(family, "outputs")) is not None:
                refuse_final(config, final, edits)
                logits = outputs(params, x, inputs, config=config)
            elif field_of(config, "head") in PER_DOCUMENT:
                logits = per_document(params, inputs, x, config, final, edits)
            else:
                logits, ends = unembedded(params, x, config, final, edits)
    except KeyError as error:
        _name_missing_leaf(params, config, error)
        raise
    except AttributeError:
        refuse_towers(config)
        raise
    return (logits, tapped | ends) if taps else logits


def _through_stacks(
    params: Tree,
    inputs: Tree,
    masks: Mapping[str, Any],
    freqs_cis: Mapping[str, Any],
    config: DecoderConfig,
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
    if isinstance(params, RunParams) and params.run.stage is not None:
        x = hidden(params, inputs, masks, freqs_cis, config=config, **options)
        last = list(stacks)[-1]
        edits = with_final_dropout({}, inputs[last], stacks[last])
        return unembedded(stack_params(params, last), x, stacks[last], (), edits)[0]
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
    """The params of a single stack of an encoder-decoder, for `forward` with that stack's config.

    Args:
        params: The params of both stacks.
        name: "encoder" or "decoder".

    Returns:
        The tree of the stack, with the leaves that both share; its leaves are not copied.
    """
    shared = {key: value for key, value in params.items() if key not in ("encoder", "decoder")}
    return with_run(params, shared | params.get(name, {}))  # a stage of a pipeline may have nothing of one


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
    """The final hidden states of a model, before the final norm (which belongs to `family.unembed`).

    Args:
        params: The tree of `family.spec(config)`.
        inputs: Those of `prepare`, or token ids [B, S], or embeddings [B, S, D], as for `forward`.
        masks: {kind: mask} for each kind of layer, of `prepare`.
        freqs_cis: {kind: rotary table}, of `prepare`.
        config: The model's config.
        taps: Activations to return, as for `forward`.
        cache: The cache's side of a step, which `fnmodels.cache` makes; None: no cache.
        **options: Keywords of `forward`.

    Returns:
        [B, S, D]; with taps (states, {name: tensor}). With a cache {layer index: new entry} is returned beside them,
        last.

    Raises:
        ValueError: Arguments do not fit each other, or a tap is unknown.
    """
    given = ForwardOptions(**options) if options else USUAL
    x, tapped, entries = hidden_states(params, inputs, masks, freqs_cis, config, given, taps, cache)
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


def hidden_states(
    params: Tree,
    inputs: Tree,
    masks: Mapping[str, MaskLike],
    freqs_cis: Mapping[str, Tensor],
    config: DecoderConfig,
    options: ForwardOptions,
    taps: tuple[str, ...] = (),
    cache: CacheStep | None = None,
) -> tuple[Tensor, dict[str, Tensor], dict[int, Entry]]:
    """(final hidden states, taps, new entries of the cache): `hidden` with its options as one object."""
    try:
        if isinstance(params, RunParams):
            stage = params.run.stage if cache is None else None
            if stage is not None:  # which prepares the options of each of its stacks
                freqs_cis, _ = params.run.prepare(config, inputs, {}, freqs_cis, options)
                return (*stage.layers(params, inputs, masks, freqs_cis, config, taps, options), {})
            freqs_cis, options = params.run.prepare(config, inputs, masks, freqs_cis, options)
            params = dict(params)
        family = family_of(config)
        given = inputs if isinstance(inputs, (dict, Mapping)) else {}
        noise = noise_of(given, config, cached=cache is not None) if "rng" in given else None
        before, plain = options, noise is None and is_outermost()
        options = options if plain else with_kernel(options, config, noise)
        valid, routing, choices = given.get("valid"), given.get("routing"), given.get("choices")
        found = noted(masks, config, family) if plain and options is USUAL and cache is None and not taps else None
        known = found.plan if found is not None else cache.plan if cache is not None and options is before else None
        if known is None or taps:
            plan = plan_stack(config, None, _taps_in_layers(taps, config) if taps else (), options)
        else:
            plan = known
        if valid is None and plan.experts:
            raise ValueError(
                "The model has layers with experts, which must know what is padding: pass the inputs that "
                'fnmodels.prepare returns, which hold "valid" [B, S], instead of bare tokens or vectors.'
            )
        with invariant_rows(options.invariant):
            embed = family.embed if noise is None else embedded
            x = embed(params, inputs, config=config)
            if x.ndim != 3:
                raise ValueError(
                    f"The embedded inputs are {list(x.shape)}, not [B, S, D]: the batch dimension is missing. Under "
                    "vmap pass fnmodels.rows(batch), in which every row is a batch of one."
                )
            x = edit_end(options.edits, "embed", x) if options.edits else x
            if found is not None and found.is_of(x, valid, masks, freqs_cis):
                masks, freqs_cis, ready = found.masks, found.tables, True
            else:
                ready = cache is not None and cache.is_ready(x)
            made, x = x, x if ready else cleared(x, valid)  # what is ready has no padding
            extra, common = None, None
            if plan.reads_beside:
                extra = layer_inputs_of(params, inputs, x, config=config)
                shared = function_of(family, "shared")
                common = None if shared is None else shared(params, given, config=config)
        new = plain and not ready and made is x
        batch = LayerInputs(masks, freqs_cis, valid, routing, choices, cache, extra, common, noise, {}, ready, new)
        ends = {"embed": x} if taps else {}
        x, tapped, entries, _ = run_stack(params, x, batch, plan, options, ENDS)
        ends["hidden"] = x = edit_end(options.edits, "hidden", x) if options.edits else x
        return x, tapped | {name: ends[name] for name in taps if name in ends} if taps else tapped, entries
    except KeyError as error:
        _name_missing_leaf(params, config, error)
        raise
    except AttributeError:
        refuse_towers(config)
        raise


def with_kernel(options: ForwardOptions, config: DecoderConfig, noise: Tensor | None) -> ForwardOptions:
    """The options with kernel="math" for "auto" where no other can run: for transforms of torch.func that take a second
    or a forward derivative, and for dropout of attention's weights."""
    drops = noise is not None and field_of(config, "dropout").weights
    if options.kernel == "auto" and (drops or needs_second_order()):
        return replace(options, kernel="math")
    return options


def _taps_in_layers(taps: tuple[str, ...], config: DecoderConfig) -> tuple[str, ...]:
    """The names of `taps` inside layers; ValueError for a name that is neither one of these nor one of `ENDS`."""
    check_taps_tuple(taps)
    in_layers = tuple(tap for tap in taps if tap.startswith("layers."))
    for tap in taps:
        if tap not in ENDS and tap not in in_layers:
            why = "; only forward, prefill and decode pass it" if tap in FINAL else ""
            raise ValueError(f"The tap {tap!r} is unknown here{why}. There are {list_of_taps(config)}.")
    return in_layers


def layer_inputs_of(params: Tree, inputs: Tree, x: Tensor, /, *, config: DecoderConfig) -> Tensor | None:
    """Inputs of each layer beside the residual stream, [B, S, layers, P], 0 at padding; None for most models.

    x: [B, S, D], what the family's `embed` returns.
    """
    if not field_of(config, "hidden_size_per_layer_input"):
        return None
    found = function_of(family_of(config), "layer_inputs")(params, inputs, x, config=config)
    return cleared(found, inputs.get("valid") if isinstance(inputs, Mapping) else None)


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
    noise: Tensor | None = None,
    carried: Tree | None = None,
    taps: tuple[str, ...] = (),
    cache: Mapping[int, Entry] | CacheStep | None = None,
    **options: Unpack[ForwardKwargs],
) -> Any:
    """Runs the layers lo <= i < hi on hidden states, as a pipeline stage does.

    Args:
        params: A tree of which only "layers" is read: the list of all layers, or a stage's {layer index: layer}.
        x: Hidden states [B, S, D].
        masks: {kind: mask} for each kind of layer.
        freqs_cis: {kind: rotary table}.
        lo: The first layer.
        hi: The layer after the last.
        config: The model's config.
        valid: bool [B, S], False at padding; None: taken from `masks` where these are `Mask`s. Padding of x is set to
            zero before layer 0, as in `forward`, and MoE layers do not route it.
        routing: Expert indices of the full model, int64 [B, S, number of MoE layers, k], as for `forward`; None: the
            routers choose.
        choices: Chosen keys of the full model, int64 [B, S, number of layers with an indexer, k]; None: the indexers
            choose.
        layer_inputs: [B, S, layers of the full model, P], what the family's function of this name returns, for a config
            with hidden_size_per_layer_input; or its end, for layers lo to the last.
        shared: What the family's function of this name returns, where it has one.
        noise: Keys of dropout [B, S], inputs["rng"] of `prepare`; only for a config with a rate above 0.
        carried: What the layers before lo left, {} before layer 0; see `fnmodels.models.common.carried`.
        taps: Activations to return, as for `forward`.
        cache: {layer index: entry} or a `CacheStep` of these layers; None: no cache.
        **options: Keywords of `forward`.

    Returns:
        x [B, S, D], or (x, taps) with taps. With a cache {layer index: new entry} is returned too; with carried, what
        later layers read of these and of those before, last.

    Raises:
        ValueError: A layer reads keys and values of an earlier one which is neither run here nor in carried, or
            arguments do not fit each other.
    """
    if lo == 0:  # not in later stages: their input is finite already, and they match the full model bit for bit
        x = cleared(x, valid_of_masks(masks, x) if valid is None else valid)
    step = CacheStep(cache) if isinstance(cache, Mapping) else cache
    how = ForwardOptions(**options)
    if isinstance(params, RunParams):
        freqs_cis, how = params.run.prepare(config, {}, masks, freqs_cis, how)
    how = with_kernel(how, config, noise)
    beside, ready = (layer_inputs, shared, noise, carried or {}), step is not None and step.is_ready(x)
    batch = LayerInputs(masks, freqs_cis, valid, routing, choices, step, *beside, ready)
    x, tapped, entries, passed = run_stack(params, x, batch, plan_stack(config, range(lo, hi), taps, how), how)
    found = _returned(x, tapped, entries, taps, cache)
    if carried is None:
        return found
    left = left_for(family_of(config).kinds(config), hi, *passed)
    return (*found, left) if isinstance(found, tuple) else (found, left)

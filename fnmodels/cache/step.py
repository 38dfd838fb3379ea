"""`prefill`, `decode` and `decode_`: one step of a model on a cache."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from fnmodels.apply import hidden_states
from fnmodels.inputs.mask import Mask, MaskLike, attention_part
from fnmodels.models.common.family import DecoderConfig
from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.ops.slots import Entry
from fnmodels.options import USUAL, Edit, ForwardKwargs, ForwardOptions
from fnmodels.run_params import RunParams
from fnmodels.taps import FINAL
from fnmodels.tree import Tree
from fnmodels.unembedding import unembedded

from .prepare import KnownStep
from .step_plan import PlannedStep, plan_rows, plan_step
from .value import Cache, consume


def prefill(
    params: Tree,
    inputs: Tree,
    masks: Mapping[str, MaskLike],
    freqs_cis: Mapping[str, Tensor],
    cache: Cache,
    /,
    *,
    config: DecoderConfig,
    at: str | Tensor = "last",
    **options: Unpack[ForwardKwargs],
) -> tuple[Tensor, Cache]:
    """Runs new tokens through the model and returns the logits of the last, with the cache that has these tokens.

    Args:
        params: The parameters of the model.
        inputs: Those of `prepare_step`.
        masks: Those of `prepare_step`, or for images whose tokens see each other also those of a family's
            `image_masks`.
        freqs_cis: Those of `prepare_step`.
        cache: The tokens before; it is not changed.
        config: The model's config.
        at: The tokens whose logits are computed. "last": each row's last token that is no padding; an index in the row
            per row, int64 [B]; "all". A row of padding only has meaningless logits at "last".
        **options: Keywords of `fnmodels.forward`.

    Returns:
        Logits [B, V], with "all" [B, S, V], and the cache with the new tokens.

    Raises:
        TypeError: A mask is no `fnmodels.inputs.Mask`.
        ValueError: Masks are not of this cache.
    """
    given = ForwardOptions(**options)
    x, after = step_on(params, (inputs, masks, freqs_cis), cache, config, given, inplace=False)
    with invariant_rows(given.invariant):
        return logits_at(params, x, inputs, config, at, given.edits), after


def decode(
    params: Tree,
    inputs: Tree,
    masks: Mapping[str, MaskLike],
    freqs_cis: Mapping[str, Tensor],
    cache: Cache,
    /,
    *,
    config: DecoderConfig,
    at: str | Tensor = "all",
    **options: Unpack[ForwardKwargs],
) -> tuple[Tensor, Cache]:
    """`prefill` with the logits of all new tokens.

    Args:
        params: The parameters of the model.
        inputs: Those of `prepare_step`.
        masks: Those of `prepare_step`.
        freqs_cis: Those of `prepare_step`.
        cache: The tokens before; it is not changed.
        config: The model's config.
        at: The tokens whose logits are computed, as for `prefill`.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        Logits [B, S, V], with another `at` [B, V], and the cache with the new tokens.
    """
    return prefill(params, inputs, masks, freqs_cis, cache, config=config, at=at, **options)


def decode_(
    params: Tree,
    inputs: Tree,
    masks: Mapping[str, MaskLike],
    freqs_cis: Mapping[str, Tensor],
    cache: Cache,
    /,
    *,
    config: DecoderConfig,
    at: str | Tensor = "all",
    **options: Unpack[ForwardKwargs],
) -> tuple[Tensor, Cache]:
    """`decode` that writes into the cache's tensors and uses the cache up; without gradients.

    Args:
        params: The parameters of the model.
        inputs: Those of `prepare_step`.
        masks: Those of `prepare_step`.
        freqs_cis: Those of `prepare_step`.
        cache: The tokens before, which must not be used again.
        config: The model's config.
        at: The tokens whose logits are computed, as for `prefill`.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        Logits [B, S, V], with another `at` [B, V], and the cache with the new tokens, in the same memory.
    """
    given = ForwardOptions(**options) if options else USUAL
    if torch.is_grad_enabled():
        with torch.no_grad():
            return written(params, (inputs, masks, freqs_cis), cache, config, at, given)[:2]
    return written(params, (inputs, masks, freqs_cis), cache, config, at, given)[:2]


def tapped_decode_(
    params: Tree,
    prepared: tuple[Tree, Mapping[str, MaskLike], Mapping[str, Tensor]],
    cache: Cache,
    taps: tuple[str, ...],
    /,
    *,
    config: DecoderConfig,
    at: str | Tensor = "all",
    **options: Unpack[ForwardKwargs],
) -> tuple[Tensor, Cache, dict[str, Tensor]]:
    """`decode_` that returns activations too.

    Args:
        params: The parameters of the model.
        prepared: The result of `prepare_step`.
        cache: The tokens before, which must not be used again.
        taps: Activations to return, as for `fnmodels.hidden`.
        config: The model's config.
        at: The tokens whose logits are computed, as for `prefill`.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        Logits and the cache as of `decode_`, and {tap: tensor}.
    """
    with torch.no_grad():
        return written(params, prepared, cache, config, at, ForwardOptions(**options), taps)


def written(
    params: Tree,
    given: KnownStep | tuple[Tree, Mapping[str, MaskLike], Mapping[str, Tensor]],
    cache: Cache,
    config: DecoderConfig,
    at: str | Tensor,
    options: ForwardOptions,
    taps: tuple[str, ...] = (),
) -> tuple[Tensor, Cache, dict[str, Tensor]]:
    """`decode_` where no gradients are recorded, of what `prepare_step` or `prepare_rows` has made, and its taps."""
    if isinstance(given, KnownStep):
        inputs = given.prepared[0]
        planned = plan_rows(given, cache, config, options, inplace=True)
    else:
        inputs = given[0]
        planned = plan_step(given, cache, config, options, free=runs_freely(params, options), inplace=True)
    x, tapped, entries = _through_layers(params, inputs, planned, cache, taps)
    with invariant_rows(options.invariant):
        logits = logits_at(params, x, inputs, config, at, options.edits)
    after = planned.after(cache, entries)  # last, for it may write into the slots
    consume(cache)
    return logits, after, tapped


def step_on(
    params: Tree,
    prepared: tuple[Tree, Mapping[str, MaskLike], Mapping[str, Tensor]],
    cache: Cache,
    config: DecoderConfig,
    options: ForwardOptions,
    *,
    inplace: bool,
    clean: bool | None = None,
    filled: int | None = None,
) -> tuple[Tensor, Cache]:
    """(hidden states of the new tokens [B, S, D], cache with them). clean: what `is_clean` says, where it is known.

    filled: in a compiled graph, where values are not known, the slots that kinds without rings read; None: all.
    """
    free = runs_freely(params, options)
    planned = plan_step(prepared, cache, config, options, free=free, inplace=inplace, clean=clean, filled=filled)
    return run_planned(params, prepared[0], planned, cache)[:2]


def runs_freely(params: Tree, options: ForwardOptions) -> bool:
    """Whether the blocks of these parameters run as they are, so that what they read may depend on values."""
    return options.layer_fn is None and not isinstance(params, RunParams)


def run_planned(
    params: Tree, inputs: Tree, planned: PlannedStep, cache: Cache, taps: tuple[str, ...] = ()
) -> tuple[Tensor, Cache, dict[str, Tensor]]:
    """(hidden states of the new tokens [B, S, D], cache with them, {tap: tensor} as of `fnmodels.hidden`)."""
    x, tapped, entries = _through_layers(params, inputs, planned, cache, taps)
    return x, planned.after(cache, entries), tapped


def _through_layers(
    params: Tree, inputs: Tree, planned: PlannedStep, cache: Cache, taps: tuple[str, ...]
) -> tuple[Tensor, dict[str, Tensor], dict[int, Entry]]:
    """`hidden_states` of a planned step."""
    config = planned.config
    options = planned.options
    if options.edits:
        within = {name: edit for name, edit in options.edits.items() if name not in FINAL}  # those: `logits_at`
        options = replace(options, edits=within or None)
    if planned.biased:
        (read,) = (attention_part(planned.masks[kind]) for kind in cache.slots)
        assert isinstance(read, Mask)
        inputs = {**inputs, "key_positions": read.kv_positions}
    return hidden_states(params, inputs, planned.masks, planned.tables, config, options, taps, planned.step)


def logits_at(
    params: Tree,
    x: Tensor,
    inputs: Tree,
    config: DecoderConfig,
    at: str | Tensor,
    edits: Mapping[str, Edit] | None = None,
) -> Tensor:
    """Logits of hidden states x [B, S, D], see `prefill`. edits: those of the final norm are applied."""
    if isinstance(at, str) and at == "all":
        return unembedded(params, x, config, (), edits or {})[0]
    if isinstance(at, str):
        if at != "last":
            raise ValueError(f'at is {at!r}; it is "last", "all", or an index per row, int64 [B].')
        if x.shape[1] == 1:
            return unembedded(params, x, config, (), edits or {})[0][:, 0]
        order = torch.arange(x.shape[1], device=x.device)
        at = order.where(inputs["valid"], 0).amax(dim=1)
    chosen = x[torch.arange(x.shape[0], device=x.device), at]
    return unembedded(params, chosen[:, None], config, (), edits or {})[0][:, 0]

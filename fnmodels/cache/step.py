"""`prefill`, `decode` and `decode_`: one step of a model on a cache."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor

from fnmodels.apply import hidden_states
from fnmodels.inputs.mask import Mask, MaskLike, attention_part
from fnmodels.models.common.family import DecoderConfig, traits_of
from fnmodels.models.common.registry import family_of
from fnmodels.ops.invariant.rows import invariant_rows
from fnmodels.options import Edit, ForwardKwargs, ForwardOptions
from fnmodels.run_params import RunParams
from fnmodels.taps import FINAL
from fnmodels.tree import Tree
from fnmodels.unembedding import unembedded

from .next_steps import laid_out_tables
from .step_plan import plan_step
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


@torch.no_grad()
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
    given = ForwardOptions(**options)
    x, after = step_on(params, (inputs, masks, freqs_cis), cache, config, given, inplace=True)
    with invariant_rows(given.invariant):
        logits = logits_at(params, x, inputs, config, at, given.edits)
    consume(cache)
    return logits, after


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
    inputs, _, freqs_cis = prepared
    run_params = isinstance(params, RunParams)
    known: dict[str, Any] = {"inplace": inplace, "clean": clean, "filled": filled}
    planned = plan_step(prepared, cache, config, options, run_params=run_params, **known)
    options = planned.options
    if options.edits:
        within = {name: edit for name, edit in options.edits.items() if name not in FINAL}  # those: `logits_at`
        options = replace(options, edits=within or None)
    if traits_of(family_of(config)).biased:
        (read,) = (attention_part(planned.masks[kind]) for kind in cache.slots)
        assert isinstance(read, Mask)
        inputs = {**inputs, "key_positions": read.kv_positions}
    if planned.rows is not None:
        freqs_cis = laid_out_tables(cache, planned.rows, freqs_cis)
    x, _, entries = hidden_states(params, inputs, planned.masks, freqs_cis, config, options, (), planned.step)
    return x, planned.after(cache, entries)


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

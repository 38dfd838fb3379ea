"""`eager_step`: `prepare_step` and `decode_` in one call."""

from typing import Any, Protocol, Unpack

import torch
from torch import Tensor

from fnmodels.models.common.family import DecoderConfig
from fnmodels.options import ForwardKwargs, ForwardOptions
from fnmodels.tree import Tree

from .compiled import DecodingStep
from .prepare import prepare_rows, prepare_step
from .step import runs_freely, written
from .value import Cache


class TappedStep(Protocol):
    """The step that `tapped_step` returns; without gradients."""

    def __call__(
        self,
        params: Tree,
        tokens: Tensor,
        cache: Cache,
        *,
        segment_ids: Tensor | None = None,
        length: int | Tensor | None = None,
    ) -> tuple[Tensor, Cache, dict[str, Tensor]]:
        """(logits [B, S, V], cache with the tokens, {tap: tensor}). cache: used up."""
        ...


def eager_step(config: DecoderConfig, **options: Unpack[ForwardKwargs]) -> DecodingStep:
    """One step of decoding in eager mode: `decode_` of what `prepare_step` makes, in one call.

    Of rows whose positions the host knows it makes no masks, unless attention reads them.

    Args:
        config: The model's config.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        The step, (params, tokens [B, S], cache) -> (logits [B, S, V], cache).
    """
    whole = tapped_step(config, (), **options)

    def step(
        params: Tree,
        tokens: Tensor,
        cache: Cache,
        *,
        segment_ids: Tensor | None = None,
        length: int | Tensor | None = None,
    ) -> tuple[Tensor, Cache]:
        return whole(params, tokens, cache, segment_ids=segment_ids, length=length)[:2]

    return step


def tapped_step(config: DecoderConfig, taps: tuple[str, ...], **options: Unpack[ForwardKwargs]) -> TappedStep:
    """`eager_step` that returns activations too, such as the experts of each token.

    Args:
        config: The model's config.
        taps: Activations to return, by the names of `fnmodels.tap_names`, as for `fnmodels.hidden`.
        **options: Keywords of `fnmodels.forward`.

    Returns:
        The step, (params, tokens [B, S], cache) -> (logits [B, S, V], cache, {tap: tensor}).
    """
    given = ForwardOptions(**options)

    def step(
        params: Tree,
        tokens: Tensor,
        cache: Cache,
        *,
        segment_ids: Tensor | None = None,
        length: int | Tensor | None = None,
    ) -> tuple[Tensor, Cache, dict[str, Tensor]]:
        if not isinstance(cache, Cache) or not isinstance(tokens, Tensor) or tokens.ndim < 2:
            raise TypeError(
                "A step takes params, tokens [B, S] and a Cache, in this order; it got "
                f"{type(params).__name__}, {_shown(tokens)} and {_shown(cache)}."
            )
        if torch.is_grad_enabled():
            with torch.no_grad():
                return step(params, tokens, cache, segment_ids=segment_ids, length=length)
        if tokens.shape[1] == 1 and segment_ids is None and cache.memory is None and runs_freely(params, given):
            known = prepare_rows(config, tokens, cache, length)
            if known is not None:
                return written(params, known, cache, config, "all", given, taps)
        prepared = prepare_step(config, tokens, cache, segment_ids=segment_ids, length=length)
        return written(params, prepared, cache, config, "all", given, taps)

    return step


def _shown(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"

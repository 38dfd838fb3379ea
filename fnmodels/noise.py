"""Dropout before the first layer and after the last, and the keys of noise that a call of a model has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from .edits import edit_end
from .models.common.family import DecoderConfig, field_of
from .models.common.registry import family_of
from .ops.dropout import dropped
from .options import Edit
from .taps import FINAL
from .tree import Tree


def noise_of(inputs: Mapping[str, Any], config: DecoderConfig, *, cached: bool = False) -> Tensor | None:
    """The keys of noise [B, S] of the inputs; None without them, or where the config's rates are 0.

    ValueError for inputs of a step on a cache.
    """
    noise: Tensor | None = inputs.get("rng")
    if noise is None or not field_of(config, "dropout").acts:
        return None
    if field_of(config, "dropout").final and not hasattr(config, "stack"):
        raise ValueError(
            f'The dropout rate "final" is for encoder-decoders, and a {config.model_type} is none: set it to 0.'
        )
    if cached:
        raise ValueError("Dropout is of training, and this call has a cache: leave rng out of the inputs.")
    return noise


def embedded(params: Tree, inputs: Tree, /, *, config: DecoderConfig) -> Tensor:
    """The family's `embed`, with dropout where the inputs have keys of noise.

    A family that projects embeddings drops them before that by itself.
    """
    x: Tensor = family_of(config).embed(params, inputs, config=config)
    noise = noise_of(inputs, config) if isinstance(inputs, (dict, Mapping)) and "rng" in inputs else None
    rate = 0.0 if noise is None or "embed_projection" in params else field_of(config, "dropout").embedding
    return dropped(x, noise, rate, "embed") if noise is not None and rate else x


def with_final_dropout(edits: Mapping[str, Edit], inputs: Tree, config: DecoderConfig) -> Mapping[str, Edit]:
    """The edits, of which that of the final norm's output drops it first, where the inputs have keys of noise."""
    noise = noise_of(inputs, config) if isinstance(inputs, (dict, Mapping)) and "rng" in inputs else None
    rate = 0.0 if noise is None else field_of(config, "dropout").final
    if noise is None or not rate:
        return edits

    def edit(value: Tensor, name: str) -> Tensor:
        return edit_end(edits, name, dropped(value, noise, rate, name))

    return {**edits, FINAL[0]: edit}

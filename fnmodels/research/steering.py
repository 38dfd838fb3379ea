"""Steering vectors: a direction added to the residual stream (arXiv 2308.10248, 2312.06681)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fnmodels.apply import hidden
from fnmodels.models.common.family import DecoderConfig
from fnmodels.options import Edit
from fnmodels.tree import Tree

from .common import Prepared, along_sequence, valid_of


def mean_difference(
    params: Tree, positive: Prepared, negative: Prepared, name: str, *, config: DecoderConfig, **options: Any
) -> Tensor:
    """The mean of a tap over the tokens of one batch, less that of another, without padding: a steering vector.

    Args:
        params: The parameters of the model.
        positive: (inputs, masks, freqs_cis) of the first batch.
        negative: Those of the batch that is subtracted.
        name: The tap.
        config: The model's config.
        **options: Keywords of `fnmodels.hidden`.

    Returns:
        [...], the tap's shape without batch and sequence.
    """
    means = []
    for prepared in (positive, negative):
        with torch.no_grad():
            _, tapped = hidden(params, *prepared, config=config, taps=(name,), **options)
        means.append(tapped[name][valid_of(prepared)].mean(0))
    return means[0] - means[1]


def steered(name: str, vector: Tensor, strength: Tensor | float = 1.0, where: Tensor | None = None) -> dict[str, Edit]:
    """Edits that add strength * vector to a tap; vmap over `strength` or `vector` runs many at once.

    Args:
        name: The tap.
        vector: [...], the tap's shape without batch and sequence.
        strength: A number, or a 0-d tensor.
        where: bool [B, S], the tokens to change; None: all.

    Returns:
        The `edits` of `fnmodels.forward`.
    """
    tensors: dict[str, Any] = {
        "vector": vector,
        "strength": torch.as_tensor(strength),
        **({} if where is None else {"where": where}),
    }
    return {name: functools.partial(_steer, **tensors)}


def _steer(value: Tensor, name: str, *, vector: Tensor, strength: Tensor, where: Tensor | None = None) -> Tensor:
    added = (strength * vector).to(value.dtype).expand(value.shape)
    return value + (added if where is None else added * along_sequence(where, value))

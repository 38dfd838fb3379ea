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
    """[...]: the mean of the tap `name` over the tokens of one batch, less that of the other, without padding."""
    means = []
    for prepared in (positive, negative):
        with torch.no_grad():
            _, tapped = hidden(params, *prepared, config=config, taps=(name,), **options)
        means.append(tapped[name][valid_of(prepared)].mean(0))
    return means[0] - means[1]


def steered(name: str, vector: Tensor, strength: Tensor | float = 1.0, where: Tensor | None = None) -> dict[str, Edit]:
    """The `edits` that add strength * vector to the tap `name`, at all tokens, or where `where`, bool [B, S], is True.

    vmap over `strength` or `vector` runs many at once.
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

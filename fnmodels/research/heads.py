"""Attention heads: ablation by edits, and the induction score (Olsson et al. 2022, arXiv 2209.11895)."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fnmodels.apply import hidden, prepare
from fnmodels.models.common.family import DecoderConfig
from fnmodels.options import Edit
from fnmodels.tree import Tree, leaves

from .common import names_of


def ablate_heads(heads: Mapping[int, Sequence[int]], *, mean: Mapping[int, Tensor] | None = None) -> dict[str, Edit]:
    """Edits that replace the outputs of heads by 0 or by a mean.

    Args:
        heads: {layer: the heads to ablate}.
        mean: {layer: [N, H]}, the outputs that replace them (mean ablation); None: 0.

    Returns:
        The `edits` of `fnmodels.forward`.
    """

    def edit(layer: int) -> Edit:
        tensors: dict[str, Any] = {"heads": torch.tensor(list(heads[layer]), dtype=torch.int64)}
        return functools.partial(_replaced, **tensors | ({} if mean is None else {"by": mean[layer]}))

    return {f"layers.{layer}.attention.z": edit(layer) for layer in heads}


def induction_scores(
    params: Tree, *, config: DecoderConfig, length: int = 25, batch: int = 8, seed: int = 0
) -> dict[str, Tensor]:
    """The induction score of each head (arXiv 2209.11895), on random tokens that are repeated once.

    The score is the mean weight with which a token of the repetition attends to the token after its first occurrence.

    Args:
        params: The parameters of the model.
        config: The model's config.
        length: Tokens of the first half.
        batch: The number of random rows.
        seed: Of the tokens.

    Returns:
        {"layers.N.attention.pattern": [N], from 0 to 1 for a perfect induction head}.
    """
    generator = torch.Generator().manual_seed(seed)
    half = torch.randint(config.vocab_size, (batch, length), generator=generator).to(leaves(params)[0].device)
    names = names_of(config, "attention.pattern")
    with torch.no_grad():
        _, tapped = hidden(
            params, *prepare(config, torch.cat((half, half), 1)), config=config, kernel="math", taps=tuple(names)
        )
    queries = torch.arange(length, 2 * length)
    return {name: tapped[name][:, :, queries, queries - length + 1].mean((0, 2)) for name in names}


def _replaced(value: Tensor, name: str, *, heads: Tensor, by: Tensor | None = None) -> Tensor:
    chosen = torch.zeros(value.shape[2], dtype=torch.bool, device=value.device)
    chosen = chosen.index_fill(0, heads.to(value.device), True)
    there = torch.zeros_like(value) if by is None else by.to(value.dtype).expand(value.shape)
    return torch.where(chosen[:, None], there, value)

"""From tokens to vectors."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def embed_tokens(table: Tensor, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
    """[B, S, D] from `prepare`'s inputs, from bare token ids [B, S], or from vectors [B, S, D], which pass through."""
    tokens = inputs["tokens"] if isinstance(inputs, Mapping) else inputs
    return tokens if tokens.is_floating_point() else look_up(table, tokens, "token ids")


def look_up(table: Tensor, ids: Tensor, name: str) -> Tensor:
    """[B, S, D], the rows `ids` [B, S] of `table` [rows, D]; on the CPU a ValueError if there is no such row."""
    try:
        return F.embedding(ids, table)
    except IndexError:  # torch's own says neither which nor of what
        raise ValueError(
            f"The {name} go from {int(ids.min())} to {int(ids.max())}, but the model knows those from 0 to "
            f"{table.shape[0] - 1}."
        ) from None

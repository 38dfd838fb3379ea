"""Token embedding: table lookups with range errors in plain words."""

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def embed_tokens(table: Tensor, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
    """Embeddings [B, S, D] of `prepare`'s inputs or token ids [B, S]; vectors [B, S, D] are returned unchanged."""
    tokens = inputs["tokens"] if isinstance(inputs, Mapping) else inputs
    return tokens if tokens.is_floating_point() else look_up(table, tokens, "token ids")


def look_up(table: Tensor, ids: Tensor, name: str) -> Tensor:
    """[B, S, D], the rows `ids` [B, S] of `table` [rows, D]. On the CPU, ValueError for an id out of range.

    name: what the ids are, for the message.
    """
    try:
        return F.embedding(ids, table)
    except IndexError:  # torch's message names neither the id nor the table
        raise ValueError(
            f"The {name} go from {int(ids.min())} to {int(ids.max())}, but the model knows those from 0 to "
            f"{table.shape[0] - 1}."
        ) from None

"""From tokens to vectors."""

from __future__ import annotations

from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor


def embed_tokens(table: Tensor, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
    """[B, S, D] from `prepare`'s inputs, from bare token ids [B, S], or from vectors [B, S, D], which pass through."""
    tokens = inputs["tokens"] if isinstance(inputs, Mapping) else inputs
    return tokens if tokens.is_floating_point() else F.embedding(tokens, table)

"""Candidates: the keys among which later indexers choose, those of the blocks that one indexer scores highest.

A block is `size` neighbouring positions of one document, from a multiple of `size` on, and its score the largest of its
visible keys. The block of the last visible key is always kept (DeepSeek V4.1's hierarchical indexer).
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ..indexer import Keys
from .blocks import Blocks, blocks_of


def candidates(
    scores: Callable[[slice], Tensor], parts: Iterable[slice], keys: Keys, *, count: int, size: int
) -> Tensor:
    """bool [B, Q, K]: the visible keys of `count` blocks of positions.

    scores: a function of a slice of the queries, whose scores of all keys it gives, [B, rows, K], without a gradient.
    parts: slices of the queries, of which one is in memory at once (`fnmodels.ops.indexer.pieces`). Of blocks with
    equal scores the latest is kept first.
    """
    blocks = blocks_of(keys, size)
    return torch.cat([_of_best_blocks(scores(rows), keys, keys.allowed(rows), blocks, count) for rows in parts], dim=1)


def _of_best_blocks(scores: Tensor, keys: Keys, allowed: Tensor, blocks: Blocks, count: int) -> Tensor:
    """`candidates` of some queries, which may choose the keys `allowed` [B or 1, rows, K]."""
    allowed = allowed.expand(scores.shape)
    slots = blocks.slots.unsqueeze(-2).expand(scores.shape)
    best = scores.new_full((*scores.shape[:-1], blocks.codes.shape[1]), -float("inf"))
    best = best.scatter_reduce(-1, slots, scores.masked_fill(~allowed, -float("inf")), "amax")
    last = keys.positions.unsqueeze(-2).where(allowed, -1).argmax(-1, keepdim=True)
    best = best.scatter(-1, slots.gather(-1, last), float("inf"))
    ranked, order = best.flip(-1).sort(dim=-1, descending=True, stable=True)
    kept = ranked[..., :count] != -float("inf")
    found = kept.new_zeros(best.shape).scatter(-1, best.shape[-1] - 1 - order[..., :count], kept)
    return found.gather(-1, slots) & allowed

"""A mask in the forms that kernels read: dense, FlexAttention's BlockMask, per-document offsets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .mask import Layout, Mask, MaskLike
from .tree import leaves


def is_block_mask(mask: MaskLike) -> bool:
    """Told by its parts: the module that defines it takes long to import."""
    return hasattr(mask, "mask_mod") and hasattr(mask, "kv_num_blocks")


def to_dense(mask: MaskLike) -> Tensor:
    """bool [B or 1, N or 1, Q, K], True where the query may look. Memory Q x K.

    mask: a `Mask`, such a tensor, or a BlockMask as it was created: a sliced one has lost its predicate (ValueError).
    """
    if isinstance(mask, Mask):
        return mask.dense()
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool or mask.ndim != 4:
            raise ValueError(
                f"A dense mask must be bool [B or 1, 1, Q, K], True where a query may look, "
                f"not {mask.dtype} of shape {list(mask.shape)}."
            )
        return mask
    if is_block_mask(mask):
        return _block_mask_to_dense(mask)
    raise TypeError(f"A mask is a fnmodels.Mask, a bool tensor or a BlockMask, not a {type(mask).__name__}.")


def shape_of(mask: MaskLike) -> tuple[int, int, int, int]:
    """B or 1, N or 1, Q, K. Raises as `to_dense` for what is no mask."""
    if isinstance(mask, Mask):
        return max(t.shape[0] for t in leaves(mask)), 1, mask.q_positions.shape[1], mask.kv_positions.shape[1]
    rows, heads, queries, keys = mask.shape if is_block_mask(mask) else to_dense(mask).shape
    return rows, heads, queries, keys


def _block_mask_to_dense(mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import create_mask

    # Not `mask.to_dense()`, which knows blocks of 128 x 128 only.
    (batch, heads), (queries, keys) = mask.kv_num_blocks.shape[:2], mask.seq_lengths
    try:
        return create_mask(mask.mask_mod, batch, heads, queries, keys, mask.kv_num_blocks.device)
    except RuntimeError as error:
        if "sliced" not in str(error):
            raise
        raise ValueError(
            "This BlockMask was sliced, and a slice has no predicate any more: pass the whole one, or a fnmodels.Mask."
        ) from error


TILE = 128  # queries and keys that FlexAttention treats as one
ELEMENTS = 1 << 26  # of the predicate, evaluated at a time


def to_block_mask(mask: MaskLike) -> Any:
    """FlexAttention's BlockMask of a `Mask` (a BlockMask is returned as it is).

    Equal to `create_block_mask(mask.mask_mod(), ...)`, which needs memory Q x K: here a few rows of tiles at a time.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if is_block_mask(mask):
        return mask
    if not isinstance(mask, Mask):
        raise ValueError(
            f"A BlockMask is made of a fnmodels.Mask, not of a {type(mask).__name__}, which has no predicate to give; "
            'kernel="sdpa" takes dense masks.'
        )
    queries, keys = mask.q_positions.shape[1], mask.kv_positions.shape[1]
    step = TILE * max(1, ELEMENTS // (TILE * keys * mask.q_positions.shape[0]))
    touched, full = [], []
    for begin in range(0, queries, step):
        seen = mask.part(slice(begin, begin + step), slice(None)).dense()  # [B, 1, q, K]
        seen = F.pad(seen, (0, -keys % TILE, 0, -seen.shape[2] % TILE))
        tiles = seen.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE))
        touched.append(tiles.any(dim=5).any(dim=3))
        full.append(tiles.all(dim=5).all(dim=3))
    whole = torch.cat(full, dim=2)
    listed = (*_listed(torch.cat(touched, dim=2) & ~whole), *_listed(whole))
    return BlockMask.from_kv_blocks(*listed, BLOCK_SIZE=TILE, mask_mod=mask.mask_mod(), seq_lengths=(queries, keys))


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """bool [B, 1, q, k] as the count per row of tiles, and their indices before all others."""
    return tiles.sum(dim=-1, dtype=torch.int32), tiles.int().argsort(dim=-1, descending=True, stable=True).int()


@dataclass(frozen=True)
class Ragged:
    """The documents of a batch one after another, without padding: what variable-length kernels read.

    offsets: int32 [n + 1], where each of n documents begins and the last ends. tokens: int64 [T], the places of these
    tokens in the flattened [B * S] batch; None where all are. longest: length of the longest document.
    """

    offsets: Tensor
    tokens: Tensor | None
    longest: int


def to_cu_seqlens(layout: Layout, *, device: torch.device | str | None = None) -> Ragged:
    """The documents of all rows, row by row; padding is left out. Raises TypeError for what is no Layout."""
    if not isinstance(layout, Layout):
        raise TypeError(
            f"Offsets are made of a Layout, not of a {type(layout).__name__}: fnmodels.layout(masks) makes one, or "
            "None where documents are not whole and in order; those have no offsets."
        )
    documents = [
        (row * layout.length + start, row * layout.length + stop)
        for row, ranges in enumerate(layout.rows)
        for start, stop in ranges
    ]
    lengths = [stop - start for start, stop in documents]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
    tokens = None
    if sum(lengths) < len(layout.rows) * layout.length:
        places = [torch.arange(start, stop, device=device) for start, stop in documents]
        tokens = torch.cat(places) if places else torch.zeros(0, dtype=torch.int64, device=device)
    return Ragged(offsets, tokens, max(lengths, default=0))

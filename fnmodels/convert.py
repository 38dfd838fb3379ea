"""A mask in the forms that kernels read: dense, FlexAttention's BlockMask, per-document offsets."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .mask import Layout, Mask, MaskLike


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


def to_block_mask(mask: MaskLike) -> Any:
    """FlexAttention's BlockMask of a `Mask` (a BlockMask is returned as it is). Memory Q x K while it is made."""
    from torch.nn.attention.flex_attention import create_block_mask

    if is_block_mask(mask):
        return mask
    if not isinstance(mask, Mask):
        raise ValueError(
            f"A BlockMask is made of a fnmodels.Mask, not of a {type(mask).__name__}, which has no predicate to give; "
            'kernel="sdpa" takes dense masks.'
        )
    (rows, queries), (kv_rows, keys) = mask.q_positions.shape, mask.kv_positions.shape
    batch = max(rows, kv_rows, mask.q_segments.shape[0], mask.kv_segments.shape[0])
    return create_block_mask(mask.mask_mod(), batch, None, queries, keys, device=mask.q_positions.device)


@dataclass(frozen=True)
class Packed:
    """The documents of a batch one after another, without padding: what variable-length kernels read.

    offsets: int32 [n + 1], where each of n documents begins and the last ends. tokens: int64 [T], the places of these
    tokens in the flattened [B * S] batch; None where all are. longest: length of the longest document.
    """

    offsets: Tensor
    tokens: Tensor | None
    longest: int


def to_cu_seqlens(layout: Layout, *, device: torch.device | str | None = None) -> Packed:
    """The documents of all rows, row by row; padding is left out."""
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
    return Packed(offsets, tokens, max(lengths, default=0))

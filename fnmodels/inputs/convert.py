"""Conversion of masks and layouts to the forms that kernels read: dense masks and cumulative sequence lengths."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from .block_mask import _block_mask_to_dense, is_block_mask
from .layout import Layout
from .mask import Mask, MaskLike
from .order import Segments


def to_dense(mask: MaskLike) -> Tensor:
    """A mask as a tensor of bools. Memory is Q x K.

    Args:
        mask: A `Mask`, a bool tensor [B or 1, 1, Q, K], or a BlockMask.

    Returns:
        bool [B or 1, N or 1, Q, K], True where the query may attend to the key.

    Raises:
        ValueError: A tensor has another dtype or shape, or a sliced BlockMask has lost its predicate.
        TypeError: It is no mask.
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
    raise TypeError(f"A mask is a fnmodels.inputs.Mask, a bool tensor or a BlockMask, not a {type(mask).__name__}.")


def shape_of(mask: MaskLike) -> tuple[int, int, int, int]:
    """(B or 1, N or 1, Q, K) of a mask, with Q and K the tokens of `Segments`. Errors as in `to_dense`."""
    if isinstance(mask, Segments):
        rows, length = mask.segment_ids.shape
        return rows, 1, length, length
    if isinstance(mask, Mask):
        q, kv = mask.q_positions.shape, mask.kv_positions.shape
        rows = max(q[0], kv[0], mask.q_segments.shape[0], mask.kv_segments.shape[0])
        if mask.q_spans is not None or mask.kv_spans is not None:
            rows = max([rows, *(t.shape[0] for t in (mask.q_spans, mask.kv_spans) if t is not None)])
        return rows, 1, q[1], kv[1]
    rows, heads, queries, keys = mask.shape if is_block_mask(mask) else to_dense(mask).shape
    return rows, heads, queries, keys


@dataclass(frozen=True)
class Ragged:
    """The documents of a batch concatenated without padding, the input of variable-length attention kernels.

    offsets: int32 [n + 1], cumulative sequence lengths (cu_seqlens) of n documents. tokens: int64 [T], the indices of
    these tokens in the flattened [B * S] batch; None if there is no padding. longest: length of the longest document.
    """

    offsets: Tensor
    tokens: Tensor | None
    longest: int


def to_cu_seqlens(layout: Layout, *, device: torch.device | str | None = None) -> Ragged:
    """The documents of all rows, row by row, without padding, for variable-length attention kernels.

    Args:
        layout: The document ranges of a batch.
        device: Of the tensors; None: torch's default device.

    Returns:
        The cumulative sequence lengths, the indices of the tokens, and the longest length.

    Raises:
        TypeError: `layout` is no Layout.
    """
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
        indices = [torch.arange(start, stop, device=device) for start, stop in documents]
        tokens = torch.cat(indices) if indices else torch.zeros(0, dtype=torch.int64, device=device)
    return Ragged(offsets, tokens, max(lengths, default=0))

"""The token before each one in its document (the token shift of RWKV, arXiv 2305.13048)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .conv import short_conv
from .conv_reads import Reads


def token_shift(
    x: Tensor,
    segment_ids: Tensor,
    tail: Tensor | None = None,
    last: Tensor | None = None,
    *,
    reads: Reads | None = None,
    kernel: Any = "auto",
) -> tuple[Tensor, Tensor]:
    """(before [B, S, D], tail [B, 1, D]): x of the token before each one, zeros for the first of a document.

    x: [B, S, D]. segment_ids: [B or 1, S] int64; padding is skipped wherever it stands. tail, last: x of the last token
    before these, and its segment id [B]. reads: what `reads_of` returns for two taps, for several shifts of the same
    tokens. kernel: as for `short_conv`.
    """
    taps = torch.eye(1, 2, dtype=x.dtype, device=x.device).expand(x.shape[-1], -1)  # none of the token itself
    return short_conv(x, taps, None, segment_ids, tail, last, reads=reads, kernel=kernel)

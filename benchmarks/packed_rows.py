"""Rows of packed documents with random tokens, for benchmarks of packed training."""

from collections.abc import Sequence

import torch
from torch import Tensor

import fnmodels


def packed_rows(lengths: Sequence[int], rows: int, vocab_size: int, device: str = "cpu") -> dict[str, Tensor]:
    """A batch; each row has the same documents in another order."""
    rolled = [[*lengths[row:], *lengths[:row]] for row in range(rows)]
    segment_ids = fnmodels.segments_from_lengths(rolled).to(device)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, segment_ids.shape, generator=generator).to(device)
    labels = torch.where(segment_ids.roll(-1, 1) == segment_ids, tokens.roll(-1, 1), -100)
    labels[:, -1] = -100
    positions = fnmodels.positions_from_segments(segment_ids)
    return {"tokens": tokens, "positions": positions, "segment_ids": segment_ids, "labels": labels}

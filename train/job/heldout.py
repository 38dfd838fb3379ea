"""Held-out loss, and what it means in bits per byte."""

import math
from collections.abc import Callable
from typing import Any

import torch

from fnmodels import document_layout
from fnmodels.tree import Tree
from train.data.rows import Batch, select_rows

ROWS_AT_ONCE = 8


def heldout_loss(loss: Callable[..., tuple[Any, ...]], params: Tree, rows: Batch) -> float:
    """Mean loss in nats per target over the rows. `loss(params, batch, layout=...)` returns (sum, count, ...)."""
    total, count = 0.0, 0
    with torch.no_grad():
        for indices in torch.arange(len(rows["tokens"])).split(ROWS_AT_ONCE):
            batch = select_rows(rows, indices)
            part_sum, part_count, *_ = loss(
                params, batch, layout=document_layout(batch["positions"], batch["segment_ids"])
            )
            total, count = total + float(part_sum), count + int(part_count)
    return total / max(count, 1)


def bits_per_byte(loss: float, targets: int, size: int) -> float:
    """`loss` in nats per target, over `targets` tokens that stand for `size` bytes of text."""
    return loss / math.log(2) * targets / size


def spread(rows: Batch, count: int) -> Batch:
    """`count` rows at equal distances, so that a sample touches many documents."""
    total = len(rows["tokens"])
    return select_rows(rows, torch.arange(min(count, total)) * total // min(count, total))

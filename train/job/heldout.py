"""Evaluation on held-out text: mean loss, and its conversion to bits per byte."""

import math
from collections.abc import Callable
from typing import Any

import torch

from fnmodels.tree import Tree
from train.data.rows import Batch, select_rows
from train.loss import as_loss

EVAL_BATCH_ROWS = 8


def heldout_loss(loss: Callable[..., tuple[Any, ...]], params: Tree, rows: Batch) -> float:
    """Mean loss over `rows` in nats per target. `loss(params, batch)` returns (sum, count, ...)."""
    total, count, run = 0.0, 0, as_loss(loss)
    with torch.no_grad():
        for indices in torch.arange(len(rows["tokens"])).split(EVAL_BATCH_ROWS):
            batch_sum, batch_count, *_ = run(params, select_rows(rows, indices))
            total, count = total + float(batch_sum), count + batch_count.item()
    return total / (count or 1)


def bits_per_byte(loss: float, targets: int, size: int) -> float:
    """Converts `loss`, in nats per target, for `targets` tokens that encode `size` bytes of text."""
    return loss / math.log(2) * targets / size


def evenly_spaced_rows(rows: Batch, count: int) -> Batch:
    """A sample of `count` evenly spaced rows, so that it covers many documents."""
    total = len(rows["tokens"])
    return select_rows(rows, torch.arange(min(count, total)) * total // min(count, total))

"""Evaluation on held-out data: mean loss, and its conversion to bits per byte."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from train.batch import Entries
from train.data.rows import select_rows

EVAL_BATCH_ROWS = 8
SumOf = Callable[[Any], tuple[Tensor, Tensor]]  # (sum, count) of the loss of a batch


def mean_loss(loss: SumOf, batches: Iterable[Any]) -> float:
    """Mean loss over the batches, in nats per target."""
    total, count = 0.0, 0.0
    for batch in batches:
        batch_sum, batch_count = loss(batch)
        total, count = total + float(batch_sum), count + float(batch_count)
    return total / (count or 1)


def in_batches(rows: Entries) -> Iterator[Entries]:
    """The rows in batches of EVAL_BATCH_ROWS, the last of which may be smaller."""
    for indices in torch.arange(len(rows["tokens"])).split(EVAL_BATCH_ROWS):
        yield select_rows(rows, indices)


def bits_per_byte(loss: float, targets: int, size: int) -> float:
    """Converts `loss`, in nats per target, for `targets` tokens that encode `size` bytes of text."""
    return loss / math.log(2) * targets / size


def evenly_spaced_rows(rows: Entries, count: int) -> Entries:
    """A sample of `count` evenly spaced rows, so that it covers many documents."""
    total = len(rows["tokens"])
    return select_rows(rows, torch.arange(min(count, total)) * total // min(count, total))

"""What every stage of a pipeline needs of a part of the batch, and what is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import fnmodels
from fnmodels.inputs.packing import IGNORE
from train.loss_call import Batch, layout_of
from train.losses.next_token import replayed
from train.parallel.padding import check_entries, padded

from .schedule import Pipeline, check_microbatches
from .types import Microbatch, Staged


def microbatches(loss: Staged, pipe: Pipeline, parts: Sequence[Batch]) -> list[Microbatch]:
    """The parts, prepared. ValueError in a sentence, the same on every rank since all have the same parts.

    Every stage expects hidden states of one shape. So parts of fewer rows, or of less length, are padded to what the
    largest has, which changes no result.
    """
    check_microbatches(pipe, len(parts))
    return [_microbatch(loss, part) for part in bucketed(parts)]


def bucketed(parts: Sequence[Batch]) -> list[Batch]:
    """The parts, all as long as the longest, and of as many rows as the one that has most."""
    rows, longest = (max(part["tokens"].shape[dim] for part in parts) for dim in (0, 1))
    return [padded(part, longest, rows) for part in parts]


def _microbatch(loss: Staged, batch: Batch) -> Microbatch:
    check_entries(batch, "tokens", "positions", "segment_ids")
    check_ids(batch, loss.config.vocab_size)
    if loss.check is not None:
        loss.check(batch)
    inputs, masks, freqs_cis = fnmodels.prepare(
        loss.config,
        batch["tokens"],
        positions=batch["positions"],
        segment_ids=batch["segment_ids"],
        length=loss.length_of(batch["positions"]),
    )
    layout = layout_of(batch, loss.compiled)
    return Microbatch(batch, replayed(inputs, batch), masks, freqs_cis, layout)


def check_ids(batch: Batch, size: int) -> None:
    """ValueError for tokens and labels outside of the vocabulary, on the CPU.

    One process alone would stumble over them, and the others would wait. On other devices looking would wait too, and
    the kernel that meets such an id ends its process, and with it the others.
    """
    for name in ("tokens", "labels"):
        ids = batch.get(name)
        if ids is None or not ids.is_cpu or not ids.numel() or ids.is_floating_point():
            continue
        known = ids if name == "tokens" else ids.where(ids != IGNORE, 0)
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= size:
            raise ValueError(f"The {name} go from {low} to {high}; the model knows 0 to {size - 1}.")

"""What every stage of a pipeline needs of a part of the batch, and what is refused before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import MaskLike
from fnmodels.inputs.packing import IGNORE
from train.loss_call import Batch, layout_of
from train.losses.next_token import replayed

from .schedule import Pipeline, check_microbatches
from .staged_loss import Staged

PLACES = "places"  # of columns among all, where the order is another
# What padding is in each entry of a batch; 0 in all others. Its places are behind all that there are.
_PADDING = {"labels": IGNORE, "next_labels": IGNORE, "next_tokens": -1, PLACES: 1 << 31}


@dataclass(frozen=True)
class Microbatch:
    """What every stage needs of one part of a batch; all but the layout lead with its rows."""

    batch: Batch
    inputs: Mapping[str, Tensor]
    masks: Mapping[str, MaskLike]
    freqs_cis: Mapping[str, Tensor]
    layout: Layout | None


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


def padded(batch: Batch, length: int, rows: int | None = None) -> Batch:
    """The batch with rows of `length` tokens, and `rows` of them: padding stands behind what there is."""
    sizes = tuple(batch["tokens"].shape[:2])
    wanted = (sizes[0] if rows is None else rows, length)
    if sizes == wanted:
        return batch

    def larger(name: str, tensor: Tensor) -> Tensor:
        if tuple(tensor.shape[:2]) != sizes:
            raise ValueError(
                f"{name} is {list(tensor.shape)} beside tokens {list(sizes)}, so it cannot be padded to {list(wanted)}."
            )
        behind = (0, wanted[1] - sizes[1], 0, wanted[0] - sizes[0])
        return F.pad(tensor, (0, 0) * (tensor.ndim - 2) + behind, value=_PADDING.get(name, 0))

    return {name: larger(name, tensor) for name, tensor in batch.items()}


def clear_length(length: int, multiple: int, config: Any) -> int:
    """The least multiple that rows of `length` tokens can be padded to and that is no size of the model.

    So what has as many columns as the padded batch has them of its tokens, and is not logits of one token, say.
    """
    sizes = {size for leaf in tree.leaves(fnmodels.family_of(config).spec(config)) for size in leaf.shape}
    sizes |= {value for value in vars(config).values() if isinstance(value, int)}
    wanted = length + -length % multiple
    while wanted in sizes:
        wanted += multiple
    return wanted


def unpadded(x: Tensor, *, larger: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """Of what comes of a batch that was padded from [rows, columns] `size` to `larger`, what it had before.

    Cut is what has both dimensions first. ValueError for what has the rows alone, where rows were added.
    """
    if tuple(x.shape[:2]) == larger:
        return x[: size[0], : size[1]]
    if size[0] != larger[0] and x.ndim and x.shape[0] == larger[0]:
        raise ValueError(
            f"A microbatch of {size[0]} rows was padded to {larger[0]} for a pipeline, and the function returns "
            f"{list(x.shape)}, where only [B, S, ...], here {list(larger)}, tells tokens from padding: give "
            "microbatches of as many rows each."
        )
    return x


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


def check_entries(batch: Batch, *names: str) -> None:
    """ValueError where the batch has not all of these."""
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(f"The batch has no {' and no '.join(missing)}; its keys are {sorted(batch)}.")


def check_shapes(batch: Batch) -> None:
    """ValueError for entries that are not tensors [B, S, ...], as the tokens are."""
    size = list(batch["tokens"].shape[:2])
    for path, tensor in tree.flatten(batch).items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{path} is of type {type(tensor).__name__}; a batch is a dict of tensors.")
        if tensor.ndim < 2 or list(tensor.shape[:2]) != size:
            raise ValueError(f"{path} is {list(tensor.shape)} beside tokens {size}; it must begin with these two.")


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

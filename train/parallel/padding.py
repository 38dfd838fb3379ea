"""Padding of a batch's sequence dimension to a length that every rank can shard, and its removal from outputs."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.inputs.packing import IGNORE
from train.loss_call import Batch

PLACES = "places"  # of columns among all, where the order is another


# What padding is in each entry of a batch; 0 in all others. Its places are behind all that there are.
_PADDING = {"labels": IGNORE, "next_labels": IGNORE, "next_tokens": -1, PLACES: 1 << 31}


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

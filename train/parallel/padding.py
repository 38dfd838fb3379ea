"""Padding of a batch's sequence dimension to a length that every rank can shard, and its removal from outputs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.inputs.packing import IGNORE
from fnmodels.models.common.family import DecoderConfig
from train.batch import PLACES, Entries, check_entry

# The padding value of each entry of a batch; 0 for all others. Padding sorts last by PLACES.
_PADDING = {"labels": IGNORE, "next_labels": IGNORE, "next_tokens": -1, PLACES: 1 << 31}


def padded(batch: Entries, length: int, rows: int | None = None) -> Entries:
    """The batch padded to `rows` rows of `length` tokens; padding follows the data."""
    sizes = tuple(batch["tokens"].shape[:2])
    wanted = (sizes[0] if rows is None else rows, length)
    if sizes == wanted:
        return batch

    def larger(name: str, tensor: Any) -> Any:
        if isinstance(tensor, dict):  # FULL_ROWS, whose positions are not sharded
            return padded(tensor, tensor["tokens"].shape[1], wanted[0])
        if is_per_row(tensor, sizes[0]):
            return torch.cat((tensor, tensor[-1:].expand(wanted[0] - sizes[0])))  # a valid value, such as a temperature
        if tuple(tensor.shape[:2]) != sizes:
            raise ValueError(
                f"{name} is {list(tensor.shape)} beside tokens {list(sizes)}, so it cannot be padded to {list(wanted)}."
            )
        behind = (0, wanted[1] - sizes[1], 0, wanted[0] - sizes[0])
        return F.pad(tensor, (0, 0) * (tensor.ndim - 2) + behind, value=_PADDING.get(name, 0))

    return {name: larger(name, tensor) for name, tensor in batch.items()}


def entry_of_tokens(batch: Entries) -> Tensor:
    """The entry that holds the tokens of a batch: "tokens" [B, S], or the "latents" [B, S, C] of a diffusion model."""
    return batch["tokens" if "tokens" in batch else "latents"]


def is_per_row(tensor: Tensor, rows: int) -> bool:
    """Whether an entry of a batch is [B], a number per row."""
    return tensor.ndim == 1 and len(tensor) == rows


def clear_length(length: int, multiple: int, config: DecoderConfig) -> int:
    """The smallest multiple of `multiple`, at least `length`, that differs from every dimension of the model.

    An output with this size in dimension 1 then has the batch's positions there, and not, say, the vocabulary.
    """
    sizes = {size for leaf in tree.leaves(fnmodels.family_of(config).spec(config)) for size in leaf.shape}
    sizes |= {value for value in vars(config).values() if isinstance(value, int)}
    wanted = length + -length % multiple
    while wanted in sizes:
        wanted += multiple
    return wanted


def unpadded(x: Tensor, *, larger: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    """Cuts an output of a batch that was padded from [rows, positions] `size` to `larger` back to `size`.

    Only tensors that lead with both dimensions are cut. ValueError for one that has rows alone, if rows were added.
    """
    if tuple(x.shape[:2]) == larger:
        return x[: size[0], : size[1]]
    if size[0] != larger[0] and x.ndim and x.shape[0] == larger[0]:
        raise ValueError(
            f"A microbatch of {size[0]} rows was padded to {larger[0]} for a pipeline, and the function returns "
            f"{list(x.shape)}, where only [B, S, ...], here {list(larger)}, distinguishes tokens from padding: pass "
            "microbatches of as many rows each."
        )
    return x


def check_shapes(batch: Entries) -> None:
    """ValueError unless all entries are tensors [B, S, ...], or [B], with the tokens' B and S."""
    size = list(batch["tokens"].shape[:2])
    for path, tensor in tree.flatten(batch).items():
        check_entry(path, tensor)
        if list(tensor.shape[:2]) != size and not is_per_row(tensor, size[0]):
            raise ValueError(
                f"{path} is {list(tensor.shape)} beside tokens {size}; it must begin with these two, or be a number "
                f"per row, [{size[0]}]."
            )

"""Large tensors a block of rows at a time, so that intermediate results stay in the cache, and memory for these.

Row: GPT-2 step.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

ELEMENTS = 1 << 18  # of a block: larger ones leave the cache, in smaller ones the calls take longer


class Space:
    """Memory by name for the steps of one loop: each writes where the one before did, and finds it in the cache."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._held = like, dict[tuple[str, torch.dtype | None], Tensor]()

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """[*shape], by default of the dtype of `like`; its values mean nothing."""
        held = self._held.get((name, dtype))
        if held is None or held.shape != shape:
            held = self._held[name, dtype] = self._like.new_empty(shape, dtype=dtype)
        return held


def rows_of_block(width: int, elements: int | None = None) -> int:
    """The number of rows of `width` elements in a block; elements: its size, by default ELEMENTS."""
    return max(1, (elements or ELEMENTS) // width)


def blocks(*tensors: Tensor, elements: int | None = None) -> Iterator[tuple[Tensor, ...]]:
    """Iterates over tensors [..., D], whose D may differ, in blocks of the same rows that fit into the cache.

    elements: of a block of the first one, by default ELEMENTS.
    """
    rows = rows_of_block(tensors[0].shape[-1], elements)
    return zip(*(t.flatten(0, -2).split(rows) for t in tensors), strict=True)


def like(t: Tensor) -> Tensor:
    """A new tensor whose rows lie one after the other, for t may be transposed."""
    return torch.empty_like(t, memory_format=torch.contiguous_format)

"""`Before`: the state of recurrent layers at the start of a piece of the rows, where other processes hold the rest.

A kernel that has an attribute `before` says that its rows are pieces, in order, of longer ones. A state is an affine
function of the state before: each op computes the two terms of its own piece, and `Before` combines those of all.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Before(Protocol):
    """The processes with the pieces before. All of them make the same calls in the same order."""

    @property
    def kernel(self) -> str:
        """The kernel in one process: "auto" or "math"."""
        ...

    def segment(self, segment_ids: Tensor) -> Tensor:
        """int64 [B]: the segment id of the last token before the piece that is no padding, 0 if there is none."""
        ...

    def state(self, transition: Tensor, own: Tensor) -> Tensor:
        """The state [B, ..., n, m] before this piece, where a piece makes `transition @ s + own` of a state s.

        transition: [B, ..., n, n] or [B, ..., 1, 1] in fp32 or wider. own: [B, ..., n, m], of its dtype.
        """
        ...


def before_of(kernel: Any, state: Tensor | None) -> Before | None:
    """The `Before` of a kernel, or None where rows begin here; ValueError for a `state` that is given too."""
    before: Before | None = getattr(kernel, "before", None)
    if before is not None and state is not None:
        raise ValueError(
            "This kernel takes the state of recurrent layers from other processes, and a state is given: with a cache "
            "every process must have all positions."
        )
    return before

"""What is asked of a simulation, and what it tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

HELD = ("parameters", "gradients", "optimizer", "gathered weights", "activations", "buffers", "working")
WIDE = 4  # bytes of what is kept and summed in fp32


@dataclass(frozen=True)
class Work:
    """What one step does. rows, length: of the global batch. microbatches: how many each rank takes its rows in.

    dtype: of gathered weights and activations. remat: "none", "full" or "every:N", as in `train.make_step`.
    """

    rows: int
    length: int
    microbatches: int = 1
    schedule: str = "1F1B"
    virtual: int | None = None
    split: tuple[int, ...] | None = None
    remat: str = "none"
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True)
class Message:
    """Messages of one kind in a step, as a rank sees them: how many, and the bytes of the whole tensors they are of.

    A ring sends (n - 1) / n of an all_gather's or a reduce_scatter's bytes, and twice that of an all_reduce's.
    """

    kind: str
    dim: str
    what: str
    count: int
    bytes: int


@dataclass(frozen=True)
class RankFacts:
    """One place in the pipeline. layers: [lo, hi) of each of its stages. waits: the part of a step it has no work."""

    pp: int
    layers: tuple[tuple[int, int], ...]
    held: Mapping[str, int]
    messages: tuple[Message, ...]
    waits: float

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.held.values())

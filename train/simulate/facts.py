"""Input and output of a simulation: `Work`, and `RankFacts` for each pipeline rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

HELD = ("parameters", "gradients", "optimizer", "gathered weights", "activations", "buffers", "working")
WIDE = 4  # bytes of an element in fp32, for state and sums


@dataclass(frozen=True)
class Work:
    """The step to simulate. rows, length: of the global batch. microbatches: into how many each rank splits its rows.

    dtype: of gathered weights and activations. remat: "none", "full" or "every:N", as in `train.make_step`. sync: when
    weights are gathered and gradients reduced: for each "microbatch", as in `train.make_step`; or once per "step", as
    Megatron-LM does it, which keeps full weights and full gradients in between.
    """

    rows: int
    length: int
    microbatches: int = 1
    schedule: str = "1F1B"
    virtual: int | None = None
    split: tuple[int, ...] | None = None
    remat: str = "none"
    dtype: torch.dtype = torch.bfloat16
    sync: Literal["microbatch", "step"] = "microbatch"

    def __post_init__(self) -> None:
        if self.sync not in ("microbatch", "step"):
            raise ValueError(f'sync is {self.sync!r}; weights are gathered per "microbatch" or per "step".')


@dataclass(frozen=True)
class Message:
    """Messages of one kind in a step, seen by one rank: their number, and the bytes of the full tensors.

    A ring sends (n - 1) / n of an all_gather's or a reduce_scatter's bytes, and twice that of an all_reduce's.
    """

    kind: str
    dim: str
    what: str
    count: int
    bytes: int


@dataclass(frozen=True)
class RankFacts:
    """One pipeline rank. layers: [lo, hi) of each of its stages. waits: the share of a step in which it is idle."""

    pp: int
    layers: tuple[tuple[int, int], ...]
    held: Mapping[str, int]
    messages: tuple[Message, ...]
    waits: float

    @property
    def total(self) -> int:
        """Bytes."""
        return sum(self.held.values())

"""Between the stream, of which all processes of a group have the same, and the part of a layer that each has alone.

Two gradients are never mixed up, and everything follows from the place where a value is:

    the stream   what lies between the sublayers. All processes compute the same with it; its gradient is there in full,
                 the same everywhere. Under sequence parallelism each process has its columns of it instead.
    inside       between `enter` and `leave`. Processes compute different things, also from values that are the same
                 everywhere, whose gradients are therefore partial: `enter` adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from . import collectives


@dataclass(frozen=True)
class Region:
    """One group of processes with the same tokens. sequence: the stream's columns are divided among them."""

    group: ProcessGroup
    rank: int
    size: int
    sequence: bool = False

    def enter(self, x: Tensor, dim: int = 1) -> Tensor:
        """The stream with all its tokens, inside; dim: that of the columns."""
        return collectives.all_gather(x, dim, self.group) if self.sequence else collectives.enter(x, self.group)

    def leave(self, y: Tensor, dim: int = 1) -> Tensor:
        """The sum over the processes, as part of the stream."""
        return collectives.reduce_scatter(y, dim, self.group) if self.sequence else collectives.leave(y, self.group)

    def cut(self, x: Tensor) -> Tensor:
        """This process' part of the stream where it is there with all its tokens."""
        return collectives.take(x, 1, self.group) if self.sequence else x

    def join(self, x: Tensor) -> Tensor:
        """The stream with all its tokens, not inside: its gradient is there in full."""
        return collectives.join(x, 1, self.group) if self.sequence else x

    def joined(self, logits: Tensor) -> Tensor:
        """Everyone's part of the vocabulary [..., V / size], with which all do the same."""
        return collectives.join(logits, -1, self.group)

    def shared(self, value: Tensor) -> Tensor:
        """What is the same in all processes, a parameter say, for use inside."""
        return collectives.enter(value, self.group)

    def all_shared(self, values: list[Tensor]) -> list[Tensor]:
        """`shared` of each, of one dtype; backward in one message."""
        return collectives.enter_all(values, self.group)

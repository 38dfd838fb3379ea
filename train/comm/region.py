"""Entry to and exit from a tensor-parallel region: the replicated residual stream outside, sharded layers inside.

Where a value is decides which gradient it has:

    residual stream   between sublayers. It is replicated, all processes compute the same with it, and each has the full
                      gradient. Under sequence parallelism each process has its positions of it instead.
    inside            between `enter` and `leave`. Processes compute different things, even from replicated values,
                      whose gradients are therefore partial: `enter` sums them.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ProcessGroup

from fnmodels.ops.invariant.rows import rows_are_invariant

from . import collectives


@dataclass(frozen=True)
class Region:
    """One group of processes with the same tokens. sequence: the residual stream is sharded along the sequence."""

    group: ProcessGroup
    rank: int
    size: int
    sequence: bool = False

    def enter(self, x: Tensor, dim: int = 1) -> Tensor:
        """The residual stream with all positions, for use inside; dim: the sequence dimension."""
        if self.sequence:
            return collectives.all_gather(x, dim, self.group)
        return collectives.enter(x, self.group, ordered=rows_are_invariant())

    def leave(self, y: Tensor, dim: int = 1) -> Tensor:
        """The sum over processes, as the residual stream (this process' positions of it)."""
        ordered = rows_are_invariant()
        if self.sequence:
            return collectives.reduce_scatter(y, dim, self.group, ordered=ordered)
        return collectives.leave(y, self.group, ordered=ordered)

    def cut(self, x: Tensor) -> Tensor:
        """This process' positions of a residual stream with all positions."""
        return collectives.take(x, 1, self.group) if self.sequence else x

    def join(self, x: Tensor) -> Tensor:
        """The residual stream with all positions, for use outside: its gradient is full, not partial."""
        return collectives.join(x, 1, self.group) if self.sequence else x

    def joined(self, logits: Tensor) -> Tensor:
        """Full logits [..., V] from shards [..., V / size], for the same use in all processes."""
        return collectives.join(logits, -1, self.group)

    def shared(self, value: Tensor) -> Tensor:
        """A replicated value, such as a parameter, for use inside."""
        return collectives.enter(value, self.group)

    def all_shared(self, values: list[Tensor]) -> list[Tensor]:
        """`shared` of each, of one dtype; backward in one message."""
        return collectives.enter_all(values, self.group)

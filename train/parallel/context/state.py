"""The state of recurrent layers and convolutions over the ranks of context parallelism, which hold pieces of rows.

Every rank computes its piece at once: the piece's map of a state is affine, so the state before each piece is a product
of small matrices, for which one all-gather suffices. Its transpose sends the gradients of states back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fnmodels.inputs.order import last_segment
from train.comm import collectives

from .once import remembered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class RanksBefore:
    """`fnmodels.ops.recurrent.before.Before` for ranks that hold contiguous pieces of each row, in order.

    kernel: how a rank computes, "auto" or "math".
    """

    def __init__(self, group: ProcessGroup, kernel: str) -> None:
        self.group, self.kernel = group, kernel
        self.segment = remembered(self._segment)

    def _segment(self, segment_ids: Tensor) -> Tensor:
        found = torch.zeros_like(segment_ids[:, 0])
        every = collectives.all_gather(last_segment(segment_ids)[None], 0, self.group)
        for last in every[: self.group.rank()]:
            found = last.where(last > 0, found)
        return found

    def state(self, transition: Tensor, own: Tensor) -> Tensor:
        """The state [B, ..., n, m] before this rank's piece, which is zeros on the first."""
        sizes = (transition[0].numel(), own[0].numel())
        sent = torch.cat((transition.flatten(1), own.flatten(1)), 1)[None]
        gathered = collectives.all_gather(sent, 0, self.group)
        # The empty sum makes the first rank, which uses no other's, take part in the backward pass too.
        state = torch.zeros_like(own) + gathered[:0].sum()
        for there in gathered[: self.group.rank()]:
            maps, adds = there.split(sizes, 1)
            state = maps.view(transition.shape) @ state + adds.view(own.shape)
        return state

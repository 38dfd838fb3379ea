"""Masks over the keys of all ranks of context parallelism, and the keys by which an indexer chooses among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.mask import Mask, MaskLike
from train.comm import collectives

from .once import remembered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def of_all_ranks(mask: Mask, group: ProcessGroup) -> Mask:
    """The mask of all ranks' queries and keys, from each rank's own: one all-gather of integers."""
    flat = tree.flatten(mask)
    stacked = torch.stack(torch.broadcast_tensors(*flat.values()), -1)
    gathered = iter(collectives.all_gather(stacked, 1, group).unbind(-1))
    return tree.map(lambda _: next(gathered), mask)


def over_all_keys(mask: Mask, group: ProcessGroup) -> Mask:
    """The mask of this rank's queries over all ranks' keys."""
    whole = of_all_ranks(mask, group)
    own = (mask.q_positions, mask.q_segments, whole.kv_positions, whole.kv_segments, mask.q_spans, whole.kv_spans)
    return Mask(*own, mask.rule)


class RanksKeys:
    """`fnmodels.ops.indexer.KeysOfRanks` for ranks that each hold some positions of every row, in any order."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.over_all = group, remembered(over_all_keys)

    def mask(self, mask: MaskLike) -> Mask:
        """The mask of this rank's queries over the keys of all ranks; ValueError for one that is no data."""
        if not isinstance(mask, Mask):
            raise ValueError(
                "Context parallelism cuts masks that are data, fnmodels.inputs.Mask, and this one is a "
                f"{type(mask).__name__}."
            )
        return self.over_all(mask, self.group)

    def gather(self, k: Tensor) -> Tensor:
        """The index keys [B, K, d] of all ranks, in their order."""
        return collectives.all_gather(k, 1, self.group)

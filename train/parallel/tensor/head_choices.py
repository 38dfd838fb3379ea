"""Choices of keys that each head of keys makes for itself, [B, S, heads k]: those of this rank's heads, and of all."""

import torch
from torch import Tensor

from train.comm import collectives
from train.comm.region import Region


def of_own_heads(choices: Tensor, heads: int, region: Region) -> Tensor:
    """The choices of the heads that this rank has, of those of `heads` heads; of fewer heads than ranks it has one."""
    first, count = region.rank * heads // region.size, max(1, heads // region.size)
    return choices.unflatten(-1, (heads, -1))[..., first : first + count, :].flatten(-2)


def of_all_heads(choices: Tensor, heads: int, region: Region) -> Tensor:
    """The choices of all heads, of those of this rank's; every rank calls it."""
    parts = collectives.all_gather(choices, choices.ndim - 1, region.group)
    copies = max(1, region.size // heads)  # ranks with the same head
    if copies == 1:
        return parts
    return torch.cat(parts.chunk(region.size, -1)[::copies], -1)

"""`Windows`: which tokens are compressed to one key, made of positions and segments alone.

A window is `ratio` neighbouring positions of one document, from a multiple of `ratio` on. It is complete, and then has
a key, where all of its tokens are in the row; a document that ends in a window, or is shorter than one, has no key for
it. A token names its window by a slot, a number in its row, and no index of a token is stored: a permutation of the
tokens is the same operation on slots as on tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels import tree

from .order import check_own_positions
from .segments import integers


@tree.pytree
@dataclass(frozen=True)
class Windows:
    """The complete windows of rows, int64 [B or 1, S] each.

    slots: the window of each token, below S / ratio; -1 for a token of none. Windows of a document that follow each
    other have slots that do. positions, segments: of the tokens; a segment of 0 or less is padding. ratio: tokens of a
    window.
    """

    slots: Tensor
    positions: Tensor
    segments: Tensor
    ratio: int = tree.static()


def build_windows(positions: Tensor, segment_ids: Tensor, ratio: int) -> Windows:
    """The `Windows` of a batch of positions and segment ids [B, S], in any order of the tokens.

    ValueError for tensors that are not integers, for a ratio below 1, and for a document with a position twice where
    values are at hand.
    """
    if ratio < 1:
        raise ValueError(f"ratio is {ratio}; a window has at least one token.")
    positions, segments = integers("positions", positions), integers("segment_ids", segment_ids)
    check_own_positions(positions, segments)
    return Windows(window_slots(positions, segments, ratio), positions, segments, ratio)


def window_slots(positions: Tensor, segments: Tensor, ratio: int) -> Tensor:
    """`Windows.slots` of positions and segments [B or 1, T]."""
    positions, segments = torch.broadcast_tensors(positions, segments)
    length = positions.shape[1]
    if length < ratio:
        return torch.full_like(positions, -1)
    span = positions.amax(dim=1, keepdim=True).clamp(min=0) + 1
    order = (segments.clamp(min=0) * span + positions).argsort(dim=1, stable=True)
    p, s = positions.gather(1, order), segments.gather(1, order)
    index = torch.arange(length, device=p.device)
    first, document = p.roll(ratio - 1, 1), s.roll(ratio - 1, 1)  # of the window that would end here
    ends = (p % ratio == ratio - 1) & (first == p - (ratio - 1)) & (document == s) & (s > 0) & (index >= ratio - 1)
    last = index + (ratio - 1 - p % ratio)  # where the last token of this one's window would stand
    inside, last = last < length, last.clamp(max=length - 1)
    same = (s.gather(1, last) == s) & (p.gather(1, last) // ratio == p // ratio)
    found = (ends.cumsum(1) - 1).gather(1, last).where(inside & same & ends.gather(1, last), -1)
    return torch.empty_like(found).scatter(1, order, found)

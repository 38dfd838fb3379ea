"""`Reads`: what short causal convolutions of the same tokens read, for rows without padding found only once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.order import runs
from fnmodels.inputs.segments import previous
from fnmodels.ops.torch_internals import is_plain_eager

from .before import before_of


@dataclass(frozen=True)
class Reads:
    """Reads of L tokens [B, L]: the K - 1 of the document that goes on, if one does, and those after them."""

    segment_ids: Tensor  # [B, L]
    goes_on: bool
    found: Tensor | list[Tensor]  # `_near`, or `_sources` where that is None
    ends: Tensor  # int64 [B, K - 1]: the indices of the last tokens of the last document, -1 where it has fewer

    def near(self) -> Tensor | None:
        """bool [K - 1, B, L]: whether a token reads the one j places before it, j from 1; None if it reads others."""
        return self.found if isinstance(self.found, Tensor) else _near_sources(self.found)

    def sources(self) -> list[Tensor]:
        """For j from 1 to K - 1 the index of the j-th token before each in its document or -1, int64 [B, L]."""
        return self.found if isinstance(self.found, list) else _sources(self.segment_ids, len(self.found) + 1)[0]


def reads_of(segment_ids: Tensor, K: int, rows: int, last: Tensor | None = None, kernel: Any = "auto") -> Reads:
    """The reads of a convolution of K taps in B = `rows` rows. segment_ids, last, kernel: as for `short_conv`."""
    if (before := before_of(kernel, last)) is not None:
        last = before.segment(segment_ids)  # of this very tensor, by which processes know that they have agreed before
    segment_ids = segment_ids.expand(rows, -1)
    if last is not None:
        segment_ids = torch.cat((last[:, None].expand(rows, K - 1), segment_ids), dim=1)
    if (near := _near(segment_ids, K)) is not None:
        return Reads(segment_ids, last is not None, near, _ends(near))
    sources, run = _sources(segment_ids, K)
    return Reads(segment_ids, last is not None, sources, _tail_index(segment_ids, sources, run, K))


def _near(segment_ids: Tensor, K: int) -> Tensor | None:
    """bool [K - 1, B, S]: whether the token j places before each is of its document, for j from 1 to K - 1.

    A fifth of the operations of `_sources`. None for rows with padding, and where values cannot be read.
    """
    if not is_plain_eager(segment_ids) or not segment_ids.numel() or not bool((segment_ids > 0).all()):
        return None
    near = segment_ids.new_zeros((K - 1, *segment_ids.shape), dtype=torch.bool)
    if K > 1:
        near[0, :, 1:] = segment_ids[:, 1:] == segment_ids[:, :-1]
    for j in range(1, min(K - 1, near.shape[2])):
        near[j, :, j:] = near[j - 1, :, j:] & near[0, :, : near.shape[2] - j]
    return near


def _ends(near: Tensor) -> Tensor:
    """`_tail_index` for rows without padding."""
    count, B, S = near.shape
    index = torch.arange(S - count, S, device=near.device).expand(B, count)
    return index.where(torch.cat((near[: count - 1, :, -1].flip(0).t(), near.new_ones(B, min(count, 1))), 1), -1)


def _sources(segment_ids: Tensor, K: int) -> tuple[list[Tensor], Tensor]:
    """(for j from 1 to K - 1 the index of the j-th token before each in its document or -1, [B, S]; run [B, S])."""
    valid, (run, _) = segment_ids > 0, runs(segment_ids)
    index = torch.arange(segment_ids.shape[1], device=segment_ids.device).expand_as(segment_ids)
    before = previous(index, valid, first=-1)
    before = before.where((run.gather(1, before.clamp(min=0)) == run) & valid, -1)
    sources = [before]
    for _ in range(K - 2):
        at = sources[-1]
        sources.append(before.gather(1, at.clamp(min=0)).where(at >= 0, -1))
    return sources[: K - 1], run


def _tail_index(segment_ids: Tensor, sources: list[Tensor], run: Tensor, K: int) -> Tensor:
    """The indices of the last K - 1 tokens of the last document, -1 where it has fewer, int64 [B, K-1]."""
    if not segment_ids.shape[1] or K == 1:
        return segment_ids.new_full((segment_ids.shape[0], K - 1), -1)
    valid = segment_ids > 0
    last = (valid.long().cumsum(1) * valid).argmax(1, keepdim=True)
    last = last.where(valid.any(1, keepdim=True), -1)
    places = [last, *(s.gather(1, last.clamp(min=0)).where(last >= 0, -1) for s in sources[: K - 2])]
    return torch.cat(places[::-1], dim=1)


def _near_sources(sources: list[Tensor]) -> Tensor | None:
    """`_near` of sources; None without any, or if one is not j places before its token, for padding lies between."""
    if not sources:
        return None
    index = torch.arange(sources[0].shape[1])
    read = torch.stack([source >= 0 for source in sources])
    shifts = torch.stack([source + j for j, source in enumerate(sources, 1)])
    return read if bool(((shifts == index) | ~read).all()) else None

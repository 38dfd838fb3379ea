"""Host-side facts of one batch: which rows are plainly causal, where documents begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels.inputs.segments import integers

from .mask import Mask, MaskLike


@dataclass(frozen=True)
class Layout:
    """Facts about one batch, read from its values on the host: for each row the [start, stop) of its documents.

    A document here is a run of one segment whose positions count up by one. Only kernels use this, and only as a way to
    do less: it never changes what is computed. A layout of other documents than the mask's raises ValueError where that
    can be seen: in eager mode with masks on the CPU. In a graph that is traced, for masks that vmap runs over, and on
    CUDA (reading would wait for the device) it is taken at its word, and a wrong one gives wrong numbers.
    """

    rows: tuple[tuple[tuple[int, int], ...], ...]
    length: int
    firsts: tuple[tuple[int, ...], ...]  # the position of each document's first token: a row may begin mid-document

    @property
    def plain(self) -> bool:
        """Every row is one whole document in order, so that causal by position is causal by index."""
        return bool(self.rows) and all(row == ((0, self.length),) for row in self.rows)


def document_layout(positions: Tensor, segment_ids: Tensor) -> Layout | None:
    """The layout of [B, S] positions and segment ids; None where a document is not one run in order (permuted)."""
    positions, segment_ids = integers("positions", positions).cpu(), integers("segment_ids", segment_ids).cpu()
    positions, segment_ids = torch.broadcast_tensors(positions, segment_ids)
    length = segment_ids.shape[1]
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    if length:
        changed = segment_ids[:, 1:] != segment_ids[:, :-1]
        starts[:, 1:] = changed | ((positions[:, 1:] != positions[:, :-1] + 1) & (segment_ids[:, 1:] > 0))
    runs: list[list[tuple[int, int, int]]] = [[] for _ in range(segment_ids.shape[0])]
    found = (starts.nonzero().tolist(), segment_ids[starts].tolist(), positions[starts].tolist())
    for (row, start), segment, first in zip(*found, strict=True):
        runs[row].append((start, segment, first))
    rows, firsts = [], []
    for run in runs:
        stops = [*(start for start, _, _ in run[1:]), length][: len(run)]  # a row of no tokens has no run
        ends = zip(run, stops, strict=True)
        documents = [(start, stop, segment, first) for (start, segment, first), stop in ends if segment > 0]
        if len({segment for _, _, segment, _ in documents}) < len(documents):
            return None
        rows.append(tuple((start, stop) for start, stop, _, _ in documents))
        firsts.append(tuple(first for *_, first in documents))
    return Layout(tuple(rows), length, tuple(firsts))


def layout(masks: Mapping[str, MaskLike]) -> Layout | None:
    """The layout of one batch's masks, made once on the host; None where they do not describe rows of whole documents.

    Pass the result to `forward` as `layout=`. It belongs to this batch in this order: make it anew after `permute` or
    `split`.
    """
    data = list({id(mask): mask for mask in masks.values() if isinstance(mask, Mask)}.values())
    if not data:
        return None
    positions, segments = data[0].q_positions, data[0].q_segments
    for m in data:
        for one, other in (
            (positions, m.q_positions),
            (positions, m.kv_positions),
            (segments, m.q_segments),
            (segments, m.kv_segments),
        ):
            if one is not other and not torch.equal(one, other):
                return None
    return document_layout(positions, segments)

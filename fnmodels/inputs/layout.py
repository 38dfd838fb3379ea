"""`Layout`: host-side facts about one batch, the document ranges of each row, which kernels use to skip work."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels.inputs.segments import integers

from .mask import Mask, MaskLike, attention_part


@dataclass(frozen=True)
class Layout:
    """The document ranges [start, stop) of each row of one batch, read from its values on the host.

    A document here is a run of one segment whose positions increase by one. Kernels use a layout only to skip work; it
    never changes the result. A layout that does not match the mask raises ValueError in eager mode with masks on the
    CPU. In a traced graph, under vmap over the masks, and on CUDA (reading would wait for the device) it is not
    checked, and a wrong one gives wrong results.

    Args:
        rows: For each row the ranges of its documents.
        length: Tokens in a row.
        firsts: For each row the position of each document's first token: a row may begin mid-document.
    """

    rows: tuple[tuple[tuple[int, int], ...], ...]
    length: int
    firsts: tuple[tuple[int, ...], ...]  # position of each document's first token: a row may begin mid-document

    def __repr__(self) -> str:
        """The sizes, not the ranges: Layout(rows=2, length=8, documents=5)."""
        return f"Layout(rows={len(self.rows)}, length={self.length}, documents={sum(map(len, self.rows))})"

    @property
    def plain(self) -> bool:
        """Whether every row is one full document in order, so that causal by position is causal by index."""
        full = ((0, self.length),)
        return bool(self.rows) and self.rows.count(full) == len(self.rows)


def document_layout(positions: Tensor, segment_ids: Tensor) -> Layout | None:
    """The layout of a batch of positions and segment ids.

    Args:
        positions: int [B, S].
        segment_ids: int [B, S], 0 or less is padding.

    Returns:
        The layout; None if a document is not a run in order (permuted).
    """
    positions, segment_ids = integers("positions", positions).cpu(), integers("segment_ids", segment_ids).cpu()
    if positions.shape != segment_ids.shape:
        positions, segment_ids = torch.broadcast_tensors(positions, segment_ids)
    length = segment_ids.shape[1]
    if length and (single := one_document_per_row(positions, segment_ids)) is not None:
        return single
    starts = torch.ones_like(segment_ids, dtype=torch.bool)
    if length:
        changed = segment_ids[:, 1:] != segment_ids[:, :-1]
        starts[:, 1:] = changed | ((positions[:, 1:] != positions[:, :-1] + 1) & (segment_ids[:, 1:] > 0))
    runs: list[list[tuple[int, int, int]]] = [[] for _ in range(segment_ids.shape[0])]
    starts_of_runs = (starts.nonzero().tolist(), segment_ids[starts].tolist(), positions[starts].tolist())
    for (row, start), segment, first in zip(*starts_of_runs, strict=True):
        runs[row].append((start, segment, first))
    rows, firsts = [], []
    for run in runs:
        stops = [*(start for start, _, _ in run[1:]), length][: len(run)]  # a row without tokens has no run
        ends = zip(run, stops, strict=True)
        documents = [(start, stop, segment, first) for (start, segment, first), stop in ends if segment > 0]
        if len({segment for _, _, segment, _ in documents}) < len(documents):
            return None
        rows.append(tuple((start, stop) for start, stop, _, _ in documents))
        firsts.append(tuple(first for *_, first in documents))
    return Layout(tuple(rows), length, tuple(firsts))


def one_document_per_row(positions: Tensor, segment_ids: Tensor) -> Layout | None:
    """The layout of [B, S] positions and segment ids where every row is one full document in order; else None."""
    rows, length = segment_ids.shape
    if not rows:
        return Layout((), length, ())
    low, high = torch.aminmax(segment_ids)
    if int(low) <= 0:
        return None
    if int(high) > int(low) and not torch.equal(segment_ids, segment_ids[:, :1].expand(rows, length)):
        return None
    firsts = positions[:, :1]
    if not torch.equal(positions, firsts + torch.arange(length)):
        return None
    return Layout((((0, length),),) * rows, length, tuple(map(tuple, firsts.tolist())))


def layout(masks: Mapping[str, MaskLike]) -> Layout | None:
    """The layout of a batch's masks, computed on the host; pass it to `forward` as `layout=`.

    It holds for this batch in this order: compute it again after `permute` or `split`.

    Args:
        masks: {kind: mask}, of `prepare`.

    Returns:
        The layout; None if documents are not contiguous and in order.
    """
    parts = map(attention_part, masks.values())
    data = list({id(mask): mask for mask in parts if isinstance(mask, Mask)}.values())
    if not data:
        return None
    positions, segments = data[0].q_positions, data[0].q_segments
    for mask in data:
        for left, right in (
            (positions, mask.q_positions),
            (positions, mask.kv_positions),
            (segments, mask.q_segments),
            (segments, mask.kv_segments),
        ):
            if left is not right and not torch.equal(left, right):
                return None
    return document_layout(positions, segments)

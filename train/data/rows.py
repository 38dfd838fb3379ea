"""Documents as token ids, and rows of them: what stands in a row is known by number, and read when a batch needs it.

B rows of a batch, S tokens of a row, R rows in all, N documents, P pieces (what one row holds of one document).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fnmodels.inputs.packing import IGNORE, pack

Batch = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Tokens:
    """Document n is the `lengths[n]` ids from `begins[n]` on, in the parts laid end to end; none lies in two parts.

    Parts are 1-D arrays of any integer dtype, in memory or mapped from files. `learnt`, where it is given, is for one
    part and says which of its tokens are targets of the loss; else all are.
    """

    parts: tuple[np.ndarray, ...]
    begins: np.ndarray  # int64 [N]
    lengths: np.ndarray  # int64 [N]
    learnt: np.ndarray | None = None  # bool

    def __post_init__(self) -> None:
        if self.learnt is not None and [self.learnt.shape] != [part.shape for part in self.parts]:
            raise ValueError(f"learnt is {self.learnt.shape}: it goes with one part, token by token")

    @property
    def total(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def learning(self) -> int:
        """How many of the tokens are targets."""
        if self.learnt is None:
            return self.total
        before = np.concatenate([[0], self.learnt.cumsum()])
        return int((before[self.begins + self.lengths] - before[self.begins]).sum())

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Ids [start, stop) of a document, fewer where it ends before."""
        return self._slice(self.parts, document, start, stop)

    def targets(self, document: int, start: int, stop: int) -> np.ndarray:
        """int64, the same ids with -100 in place of those that are not learnt."""
        ids = self.read(document, start, stop).astype(np.int64)
        if self.learnt is None:
            return ids
        return np.where(self._slice((self.learnt,), document, start, stop), ids, IGNORE)

    def _slice(self, parts: tuple[np.ndarray, ...], document: int, start: int, stop: int) -> np.ndarray:
        begin, stop = int(self.begins[document]), min(stop, int(self.lengths[document]))
        # an empty document may begin where the last part ends
        number = min(int(np.searchsorted(self._ends, begin, "right")), len(parts) - 1)
        begin -= int(self._ends[number]) - len(parts[number])
        return parts[number][begin + start : begin + stop]

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(part) for part in self.parts])


def in_line(ids: np.ndarray, lengths: np.ndarray, learnt: np.ndarray | None = None) -> Tokens:
    """Documents that follow each other in one array."""
    return Tokens((ids,), lengths.cumsum() - lengths, lengths, learnt)


def beginnings(tokens: Tokens, length: int) -> tuple[Tokens, np.ndarray]:
    """The first `length` tokens of each document that has a target among them, and which documents those are."""
    lengths = np.minimum(tokens.lengths, length)
    kept = [bool((tokens.targets(n, 1, int(size)) != IGNORE).any()) for n, size in enumerate(lengths)]
    some = np.flatnonzero(kept)
    return Tokens(tokens.parts, tokens.begins[some], lengths[some], tokens.learnt), some


@dataclass(frozen=True, eq=False)
class Rows:
    """`pieces(row)` is int64 [P,4]: document, offset in it, column, length; what no piece covers is padding."""

    tokens: Tokens
    length: int
    count: int
    pieces: Callable[[int], np.ndarray]
    dropped: int = 0  # documents that are in no row

    @property
    def fill(self) -> float:
        """The share of the rows' tokens that are not padding."""
        return self.kept / (self.count * self.length) if self.count else 0.0

    @property
    def kept(self) -> int:
        lengths = self.tokens.lengths
        return int(lengths[lengths <= self.length].sum() if self.dropped else lengths.sum())


def stream(tokens: Tokens, length: int) -> Rows:
    """All documents as one stream cut every `length` tokens; the pieces are found when they are asked for."""
    ends, total = tokens.lengths.cumsum(), tokens.total

    def cut(row: int) -> np.ndarray:
        low, high = row * length, min((row + 1) * length, total)
        documents = np.arange(np.searchsorted(ends, low, "right"), np.searchsorted(ends, high, "left") + 1)
        starts = ends[documents] - tokens.lengths[documents]
        begins = np.maximum(starts, low)
        sizes = np.minimum(ends[documents], high) - begins
        return np.stack([documents, begins - starts, begins - low, sizes], axis=1)[sizes > 0]

    return Rows(tokens, length, -(-total // length), cut)


def whole(tokens: Tokens, length: int, *, overlong: Literal["raise", "drop"] = "raise") -> Rows:
    """Whole documents, in as few rows as can be found quickly (fnmodels.pack's first fit); longer ones as told."""
    lengths = tokens.lengths.tolist()
    shapes = [torch.zeros(1, dtype=torch.int64).expand(size) for size in lengths]
    packed = pack(shapes, length, method="first_fit", split=False, overlong=overlong)
    document, offset, row, column, size = packed.pieces.numpy().T
    by_row = np.split(np.stack([document, offset, column, size], axis=1), np.flatnonzero(np.diff(row)) + 1)
    return Rows(tokens, length, packed.report.rows, by_row.__getitem__, packed.report.documents_dropped)


def gather(rows: Rows, indices: Iterable[int]) -> Batch:
    """The batch of some rows, each [B,S]. Positions count from the start of a piece.

    `fnmodels.pack` counts from the start of the document. What is attended to begins with the piece, and positions
    beyond the row's length would mislead a rotary scaling that looks at them. No target is lost where a row's end cuts
    a document: the next token is known.
    """
    indices = list(indices)
    names = ("tokens", "positions", "segment_ids", "labels")
    batch = {name: np.zeros((len(indices), rows.length), np.int64) for name in names}
    batch["labels"].fill(IGNORE)
    for b, row in enumerate(indices):
        for segment, (document, offset, column, size) in enumerate(rows.pieces(row).tolist(), 1):
            place = slice(column, column + size)
            batch["tokens"][b, place] = rows.tokens.read(document, offset, offset + size)
            batch["positions"][b, place] = np.arange(size)
            batch["segment_ids"][b, place] = segment
            labels = rows.tokens.targets(document, offset + 1, offset + size + 1)
            batch["labels"][b, column : column + len(labels)] = labels
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def everything(rows: Rows) -> Batch:
    return gather(rows, range(rows.count))


def take(batch: Batch, indices: Tensor) -> Batch:
    return {name: tensor[indices] for name, tensor in batch.items()}


def documents(rows: Rows, row: int) -> list[int]:
    """Those that have a piece in the row, in its order."""
    return rows.pieces(row)[:, 0].tolist()

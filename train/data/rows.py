"""Packing of tokenized documents into fixed-length rows, with random access: a row is built when a batch reads it.

Shapes: B rows per batch, S tokens per row, R rows in total, N documents, P pieces (the share of a document in one row).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fnmodels.inputs.packing import IGNORE, pack
from train.batch import Entries


@dataclass(frozen=True, eq=False)
class Tokens:
    """Tokenized documents: document n is ids [begins[n], begins[n] + lengths[n]) of the concatenation of `arrays`.

    The arrays are 1-D of any integer dtype, in memory or memory-mapped; no document spans two of them. `loss_mask`
    [total], allowed with a single array only, marks the tokens that are targets of the loss; None: all are.
    """

    arrays: tuple[np.ndarray, ...]
    begins: np.ndarray  # int64 [N]
    lengths: np.ndarray  # int64 [N]
    loss_mask: np.ndarray | None = None  # bool

    def __post_init__(self) -> None:
        if self.loss_mask is not None and [self.loss_mask.shape] != [array.shape for array in self.arrays]:
            raise ValueError(f"loss_mask has shape {self.loss_mask.shape}: it must be that of a single array of ids")

    @property
    def total(self) -> int:
        return int(self.lengths.sum())

    @cached_property
    def target_count(self) -> int:
        """The number of tokens that are targets of the loss."""
        if self.loss_mask is None:
            return self.total
        before = np.concatenate([[0], self.loss_mask.cumsum()])
        return int((before[self.begins + self.lengths] - before[self.begins]).sum())

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Ids [start, stop) of a document, fewer where the document is shorter."""
        return self._slice(self.arrays, document, start, stop)

    def targets(self, document: int, start: int, stop: int) -> np.ndarray:
        """The same ids as int64, with -100 for tokens that `loss_mask` excludes."""
        ids = self.read(document, start, stop).astype(np.int64)
        if self.loss_mask is None:
            return ids
        return np.where(self._slice((self.loss_mask,), document, start, stop), ids, IGNORE)

    def _slice(self, arrays: tuple[np.ndarray, ...], document: int, start: int, stop: int) -> np.ndarray:
        begin, stop = int(self.begins[document]), min(stop, int(self.lengths[document]))
        # an empty document may begin where the last array ends
        number = min(int(np.searchsorted(self._ends, begin, "right")), len(arrays) - 1)
        begin -= int(self._ends[number]) - len(arrays[number])
        return arrays[number][begin + start : begin + stop]

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum([len(array) for array in self.arrays])


def concatenated(ids: np.ndarray, lengths: np.ndarray, loss_mask: np.ndarray | None = None) -> Tokens:
    """Documents that lie one after the other in a single array: ids [T], lengths [N], loss_mask [T]."""
    return Tokens((ids,), lengths.cumsum() - lengths, lengths, loss_mask)


def truncate_documents(tokens: Tokens, length: int) -> tuple[Tokens, np.ndarray]:
    """Truncates documents to `length` tokens and drops those without a target; also returns the kept indices."""
    lengths = np.minimum(tokens.lengths, length)
    has_target = [bool((tokens.targets(n, 1, int(size)) != IGNORE).any()) for n, size in enumerate(lengths)]
    kept = np.flatnonzero(has_target)
    return Tokens(tokens.arrays, tokens.begins[kept], lengths[kept], tokens.loss_mask), kept


@dataclass(frozen=True, eq=False)
class Rows:
    """Packed rows. `pieces(row)`, int64 [P, 4], holds (document, offset in it, position in the row, length)."""

    tokens: Tokens
    length: int
    count: int
    pieces: Callable[[int], np.ndarray]
    dropped: int = 0  # longer documents that are in no row

    @property
    def fill(self) -> float:
        """The fraction of the rows' tokens that are not padding."""
        lengths = self.tokens.lengths
        tokens = lengths[lengths <= self.length] if self.dropped else lengths
        return int(tokens.sum()) / (self.count * self.length) if self.count else 0.0


def pack_stream(tokens: Tokens, length: int) -> Rows:
    """Concatenates all documents and cuts the stream every `length` tokens; pieces are computed on access."""
    ends, total = tokens.lengths.cumsum(), tokens.total

    def pieces(row: int) -> np.ndarray:
        low, high = row * length, min((row + 1) * length, total)
        documents = np.arange(np.searchsorted(ends, low, "right"), np.searchsorted(ends, high, "left") + 1)
        starts = ends[documents] - tokens.lengths[documents]
        begins = np.maximum(starts, low)
        sizes = np.minimum(ends[documents], high) - begins
        return np.stack([documents, begins - starts, begins - low, sizes], axis=1)[sizes > 0]

    return Rows(tokens, length, -(-total // length), pieces)


def pack_documents(tokens: Tokens, length: int, *, overlong: Literal["raise", "drop"] = "raise") -> Rows:
    """Packs whole documents by first fit (fnmodels.pack); longer ones raise ValueError or are dropped."""
    lengths = tokens.lengths.tolist()
    shapes = [torch.zeros(1, dtype=torch.int64).expand(size) for size in lengths]
    packed = pack(shapes, length, method="first_fit", split=False, overlong=overlong)
    document, offset, row, position, size = packed.pieces.numpy().T
    by_row = np.split(np.stack([document, offset, position, size], axis=1), np.flatnonzero(np.diff(row)) + 1)
    return Rows(tokens, length, packed.report.rows, by_row.__getitem__, packed.report.documents_dropped)


def make_batch(rows: Rows, indices: Iterable[int]) -> Entries:
    """A batch of the given rows: tokens, positions, segment_ids and labels, int64 [B, S] each.

    Positions count from the start of a piece, while `fnmodels.pack` counts from the start of the document: attention
    begins with the piece, and positions beyond the row's length would mislead a rope scaling that depends on them. The
    last token of a row has a label even where the row's end splits a document: the next token is known.
    """
    indices = list(indices)
    names = ("tokens", "positions", "segment_ids", "labels")
    batch = {name: np.zeros((len(indices), rows.length), np.int64) for name in names}
    batch["labels"].fill(IGNORE)
    for b, row in enumerate(indices):
        for segment, (document, offset, position, size) in enumerate(rows.pieces(row).tolist(), 1):
            span = slice(position, position + size)
            batch["tokens"][b, span] = rows.tokens.read(document, offset, offset + size)
            batch["positions"][b, span] = np.arange(size)
            batch["segment_ids"][b, span] = segment
            labels = rows.tokens.targets(document, offset + 1, offset + size + 1)
            batch["labels"][b, position : position + len(labels)] = labels
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def all_rows(rows: Rows) -> Entries:
    """All rows as one batch, [R, S]."""
    return make_batch(rows, range(rows.count))


def select_rows(batch: Entries, indices: Tensor) -> Entries:
    """The rows at `indices` of every tensor of a batch."""
    return {name: tensor[indices] for name, tensor in batch.items()}


def document_indices(rows: Rows, row: int) -> list[int]:
    """The documents that have a piece in the row, in order."""
    return rows.pieces(row)[:, 0].tolist()

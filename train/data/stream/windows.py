"""Rows of tokens of a streamed source, a window of some hundred rows at a time, made in a thread.

The rows are those that `train.data.rows.pack_stream` cuts from all documents, one after the other. A run shuffles the
rows of each window. So the position of a run is the cursor at which a window begins, and the number of rows read of it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from train.data.rows import Rows, Tokens, pack_stream

from .documents import Cursor, Document

T = TypeVar("T")
Encode = Callable[[list[str]], tuple[np.ndarray, np.ndarray]]  # ids of all texts, concatenated, and their lengths
GROUP_CHARACTERS = 1 << 18  # characters that are tokenized at once


@dataclass(frozen=True, eq=False)
class Window:
    """Consecutive rows of a source. end: the cursor of the row behind the last one."""

    rows: Rows
    begin: Cursor
    end: Cursor


class _Piece(NamedTuple):
    """The ids of a document that no row has yet, the cursor of the first of them and that of the next document."""

    begin: Cursor
    end: Cursor
    ids: np.ndarray


def windows(documents: Iterable[Document], encode: Encode, length: int, count: int, start: Cursor) -> Iterator[Window]:
    """Windows of `count` rows of `length` tokens.

    Args:
        documents: Train documents, from the cursor `start` on.
        encode: The tokenizer, see `train.data.encoder.encode`.
        length: Tokens of a row.
        count: Rows of a window.
        start: The cursor of the first token of the first row.

    Yields:
        The windows; a last one that the documents do not fill is left out.
    """
    pending: deque[_Piece] = deque()
    total, needed = 0, length * count
    for document, ids in _tokenized(documents, encode):
        begin = document.begin
        if begin == start._replace(skip=0):
            begin = start
        piece = _Piece(begin, document.end, ids[begin.skip :])
        if len(piece.ids):
            pending.append(piece)
            total += len(piece.ids)
        while total >= needed:
            yield _window(pending, length, count)
            total -= needed


def _tokenized(documents: Iterable[Document], encode: Encode) -> Iterator[tuple[Document, np.ndarray]]:
    """Documents with their ids, tokenized in groups."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= GROUP_CHARACTERS:
            yield from _encoded(group, encode)
            group, size = [], 0
    yield from _encoded(group, encode)


def _encoded(group: list[Document], encode: Encode) -> Iterator[tuple[Document, np.ndarray]]:
    ids, lengths = encode([document.text for document in group])
    return zip(group, np.split(ids, lengths.cumsum()[:-1]), strict=True) if group else iter(())


def _window(pending: deque[_Piece], length: int, count: int) -> Window:
    """Takes a window's tokens from `pending`. Its last document has one token more, the label of the last position."""
    needed, begin, taken = length * count, pending[0].begin, list[np.ndarray]()
    while needed:
        piece = pending.popleft()
        size = min(needed, len(piece.ids))
        taken.append(piece.ids[: size + 1])
        needed -= size
        end = piece.end
        if size < len(piece.ids):
            end = piece.begin._replace(skip=piece.begin.skip + size)
            pending.appendleft(_Piece(end, piece.end, piece.ids[size:]))
    lengths = np.array([len(ids) for ids in taken], np.int64)
    tokens = Tokens((np.concatenate(taken),), lengths.cumsum() - lengths, lengths)
    return Window(replace(pack_stream(tokens, length), count=count), begin, end)


class Background(Generic[T]):
    """An iterator whose next item is made in a thread while the last one is used."""

    def __init__(self, items: Iterable[T], name: str) -> None:
        self._items = iter(items)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._next: Future[T] = self._pool.submit(next, self._items)

    def __next__(self) -> T:
        """Waits for the next item, and raises the exception that making it raised."""
        item = self._next.result()
        self._next = self._pool.submit(next, self._items)
        return item

    def close(self) -> None:
        """Waits until the item in the making is done, and makes no other."""
        self._next.cancel()
        self._pool.shutdown()

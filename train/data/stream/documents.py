"""The documents of a streamed source, pass after pass: train documents without end, and some held-out ones.

A document is held out by the hash of its text, so that equal texts are on one side, whatever their place and number.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from fnmodels.errors import UserError
from params.imported import place_raised
from train.data.records import Record, is_unicode, record_of_row
from train.data.sampling import permute
from train.imported import FunctionFailed

from .files import StreamFile
from .readers import read_from, read_share

HELDOUT_FRACTION = 0.01
HELDOUT_BYTES = 1 << 20  # of a source's held-out text that is evaluated: its first documents
TOKENIZER_BYTES = 10_000_000  # of a source's train text that a new tokenizer is trained on

Report = Callable[[str], None]  # called with "name (reason)" of a record that is left out


class Cursor(NamedTuple):
    """A place in a source: the pass over it, the file's number in that pass, the record's place in the file.

    skip: the tokens of that document which rows before have.
    """

    epoch: int = 0
    file: int = 0
    place: int = 0
    skip: int = 0


Records = Iterator[tuple[Cursor, Cursor, str, Record]]  # (its beginning, what follows it, name of the file, record)


class Document(NamedTuple):
    """A text, the cursor of its beginning and that of what follows it."""

    begin: Cursor
    end: Cursor
    text: str


class Documents(Protocol):
    """A source of documents."""

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> str:
        """The identity of the source, as far as it is known without reading it."""

    @property
    def size(self) -> int | None:
        """Bytes of its files; None: not known."""

    def records(self, cursor: Cursor, *, shuffle: tuple[int, ...] | None) -> Records:
        """The records from a cursor on to the end of its pass.

        shuffle: the key of the order of files in this pass; None: the order of their names.
        """

    def share(self, cursor: Cursor, *, shuffle: tuple[int, ...]) -> float:
        """The fraction of the pass that lies before the cursor, as far as it is known."""


@dataclass(frozen=True)
class FileDocuments:
    """Documents in files. Each pass reads the files in an order of its own."""

    name: str
    files: tuple[StreamFile, ...]

    @property
    def identity(self) -> str:
        return repr([(file.name, file.size) for file in self.files])

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def records(self, cursor: Cursor, *, shuffle: tuple[int, ...] | None) -> Records:
        order, place = self._order(cursor.epoch, shuffle), cursor.place
        for number in range(cursor.file, len(order)):
            file, begin = self.files[order[number]], cursor._replace(file=number, place=place, skip=0)
            for after, record in read_from(file, place):
                end = begin._replace(place=after)
                yield begin, end, file.name, record
                begin = end
            place = 0

    def share(self, cursor: Cursor, *, shuffle: tuple[int, ...]) -> float:
        order = self._order(cursor.epoch, shuffle)
        before = sum(self.files[number].size for number in order[: cursor.file])
        return (before + read_share(self.files[order[cursor.file]], cursor.place)) / self.size

    def _order(self, epoch: int, shuffle: tuple[int, ...] | None) -> list[int]:
        count = len(self.files)
        return list(range(count)) if shuffle is None else permute(np.arange(count), count, *shuffle, epoch).tolist()


@dataclass(frozen=True)
class IteratedDocuments:
    """Documents of an iterable: dicts with `text`, or texts.

    Attributes:
        name: For messages.
        make: Makes the iterable, the same one for each pass. One with a method `skip(n)`, as `datasets.IterableDataset`
            has it, resumes by it; another is read from its beginning.
    """

    name: str
    make: Callable[[], Iterable[Any]]
    size: None = field(default=None, init=False)

    @property
    def identity(self) -> str:
        return self.name

    def records(self, cursor: Cursor, *, shuffle: tuple[int, ...] | None) -> Records:
        place = cursor.place
        for number, value in enumerate(self._values(place), place):
            begin = cursor._replace(place=number, skip=0)
            yield begin, begin._replace(place=number + 1), self.name, _record_of(f"item {number}", value)

    def _values(self, place: int) -> Iterator[Any]:
        """The items from a place on. FunctionFailed where the function or its iterable raises."""
        try:
            made = self.make()
            if not isinstance(made, Iterable):
                raise UserError(
                    f"{self.name} made a {type(made).__name__}: it must return an iterable of texts or dicts"
                )
            skip = getattr(made, "skip", None)
            yield from skip(place) if place and skip is not None else islice(made, place, None)
        except UserError:
            raise
        except Exception as error:
            raise FunctionFailed.of(self.name, error, place=place_raised(error)) from error

    def share(self, cursor: Cursor, *, shuffle: tuple[int, ...]) -> float:
        return 0.0


def _record_of(place: str, value: Any) -> Record:
    if isinstance(value, str):
        return Record(place, text=value) if is_unicode(value) else Record(place, fault="holds a lone surrogate")
    if isinstance(value, Mapping):
        return record_of_row(place, value)
    return Record(place, fault=f"{value!r:.40} is no text and no dict of columns")


def is_heldout(text: str) -> bool:
    """Whether a document is held out: a function of its text alone."""
    first = hashlib.sha256(text.encode("utf-8")).digest()[:8]
    return int.from_bytes(first, "big") < HELDOUT_FRACTION * 2**64


def train_documents(
    source: Documents, cursor: Cursor, shuffle: tuple[int, ...], report: Report | None = None
) -> Iterator[Document]:
    """The train documents from a cursor on, pass after pass, without end. UserError where a pass has none."""
    while True:
        empty = cursor == Cursor(cursor.epoch)  # a pass that is read from its beginning
        for document in _texts(source, cursor, shuffle, report):
            if not is_heldout(document.text):
                empty = False
                yield document
        if empty:
            raise UserError(f"{source.name} has no train document")
        cursor = Cursor(cursor.epoch + 1)


def first_train_texts(source: Documents) -> Iterator[str]:
    """The first TOKENIZER_BYTES of train text, in the order of the files."""
    size = 0
    for document in _texts(source, Cursor(), None, None):
        if not is_heldout(document.text):
            yield document.text
            size += len(document.text.encode("utf-8"))
            if size >= TOKENIZER_BYTES:
                return


def heldout_texts(source: Documents) -> tuple[str, ...]:
    """The first HELDOUT_BYTES of held-out text, in the order of the files, each text once."""
    found: dict[str, None] = {}
    size = 0
    for document in _texts(source, Cursor(), None, None):
        if is_heldout(document.text) and document.text not in found:
            found[document.text] = None
            size += len(document.text.encode("utf-8"))
            if size >= HELDOUT_BYTES:
                break
    return tuple(found)


def first_fault(source: Documents) -> str:
    """The end of a sentence about a source that is too small: its first record that cannot be read, or ""."""
    for _, _, name, record in source.records(Cursor(), shuffle=None):
        if record.fault:
            return f" ({_where(name, record)}: {record.fault})"
    return ""


def _where(name: str, record: Record) -> str:
    return f"{name}, {record.place}" if record.place else name


def _texts(
    source: Documents, cursor: Cursor, shuffle: tuple[int, ...] | None, report: Report | None
) -> Iterator[Document]:
    """The documents to the end of a pass. UserError for a conversation."""
    for begin, end, name, record in source.records(cursor, shuffle=shuffle):
        where = _where(name, record)
        if record.messages is not None:
            raise UserError(f"{source.name} holds conversations ({where}), which are not streamed: leave --stream out")
        if record.text is None:
            if report:
                report(f"{where} ({record.fault})")
        elif record.text.strip():
            yield Document(begin, end, record.text)


def of_iterable(name: str, make: Callable[[], Iterable[Any]]) -> IteratedDocuments:
    """A source from a function that makes an iterable, for example `lambda: load_dataset(..., streaming=True)`."""
    return IteratedDocuments(name, make)


def beginning(source: Documents) -> str:
    """The first train text. UserError where there is none."""
    first = next(first_train_texts(source), None)
    if first is None:
        raise UserError(f"{source.name} has no train document")
    return first

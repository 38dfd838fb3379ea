"""The records that `--data` names for an evaluation: of files, of URLs, and of functions by their import path."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fnmodels.errors import UserError
from train.data.corpus import files_of, read_files
from train.data.records import Record
from train.data.sources import parse_sources
from train.data.stream.documents import Cursor, Documents
from train.data.stream.sources import open_sources
from train.imported import Imported


@dataclass(frozen=True)
class TextRecords:
    """Sources whose existence is checked, and of which nothing is read yet. name: for messages."""

    name: str
    files: tuple[tuple[Path, tuple[Path, ...]], ...]
    streams: tuple[Documents, ...]

    def read(self) -> Iterator[tuple[str, Record]]:
        """(file, record) of all sources, local files first; a text file of a URL comes in pieces of 1 MiB."""
        for root, files in self.files:
            yield from read_files(list(files), root)
        for stream in self.streams:
            for _, _, name, record in stream.records(Cursor(), shuffle=None):
                yield name, record


def text_records(data: str) -> TextRecords:
    """The sources of `--data`: files, folders, URLs and functions, separated by commas.

    Args:
        data: The flag's value. It is of the command line, so that it may name code.

    Returns:
        The sources.

    Raises:
        UserError: A source is absent or cannot be opened, or has a weight, which an evaluation has no use for.
    """
    names, files, streams = list[str](), list[tuple[Path, tuple[Path, ...]]](), list[Documents]()
    for item, weight in parse_sources(data):
        if weight != 1:
            raise UserError(
                f"--data {data}: {item} has the weight {weight}, and all of each source is scored: leave it out"
            )
        if isinstance(item, Path):
            root, found, name = files_of(item)
            files.append((root, tuple(found)))
        else:
            name = item
            streams += open_sources(item, lambda path: Imported(path, "--data").function).sources
        names.append(name)
    return TextRecords(" and ".join(names), tuple(files), tuple(streams))


def texts_of(records: Iterable[tuple[str, Record]], skipped: list[str]) -> Iterator[tuple[str, str]]:
    """(name, text) of (file, record); what cannot be read is appended to `skipped`. UserError for a conversation."""
    for file, record in records:
        name = f"{file}, {record.place}" if record.place else file
        if record.messages is not None:
            raise UserError(f"{name} is a conversation, and texts are scored: give records with a field 'text'")
        if record.text is None:
            skipped.append(f"{name} ({record.fault})")
        else:
            yield name, record.text

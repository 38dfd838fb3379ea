"""The streamed sources that --data names, with their weights."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from train.data.sources import integer_weights, is_url, parse_sources

from .documents import Documents, FileDocuments, IteratedDocuments, first_fault, first_train_texts, heldout_texts
from .files import stream_files

Import = Callable[[str], Callable[[], Iterable[Any]]]  # (import path) -> the function there


@dataclass(frozen=True)
class StreamedSources:
    """All sources of a run, and of each the held-out texts that are evaluated."""

    sources: tuple[Documents, ...]
    weights: tuple[int, ...]
    token_sources: tuple[str, ...] = ()
    chat_sources: tuple[str, ...] = ()

    @property
    def train_texts(self) -> Iterator[str]:
        """The texts from which a new tokenizer is trained: the first of each source."""
        return (text for source in self.sources for text in first_train_texts(source))

    @cached_property
    def heldout(self) -> tuple[tuple[str, ...], ...]:
        """The held-out texts of each source. UserError where a source has none."""
        found = tuple(map(heldout_texts, self.sources))
        for source, texts in zip(self.sources, found, strict=True):
            if not texts:
                raise UserError(
                    f"{source.name} has too few documents to hold some out: a stream needs some hundred, and a file "
                    f"or folder of this machine can be read without --stream{first_fault(source)}"
                )
        return found

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the files' names and sizes and of the held-out texts: it would take long to read all."""
        result = hashlib.sha256()
        for source, texts in zip(self.sources, self.heldout, strict=True):
            result.update(f"{source.identity} {len(texts)}\n".encode())
            for text in texts:
                result.update(hashlib.sha256(text.encode()).digest())
        return result.hexdigest()

    @property
    def size(self) -> int | None:
        """Bytes of all files; None: not known."""
        sizes = [source.size for source in self.sources]
        return None if None in sizes else sum(size or 0 for size in sizes)


def open_sources(data: str, imported: Import, *, without: Path | None = None) -> StreamedSources:
    """The sources of `data`, of which no document is read yet.

    Args:
        data: As --data: paths, URLs and import paths of functions that make an iterable, with weights.
        imported: Imports such a function.
        without: A local folder whose files are left out.

    Raises:
        UserError: A source does not exist, or is of a kind that is not streamed.
    """
    found: list[Documents] = []
    items = parse_sources(data)
    for item, _ in items:
        if isinstance(item, str) and not is_url(item):
            found.append(IteratedDocuments(item, imported(item)))
        else:
            found.append(FileDocuments(str(item), stream_files(str(item), without=without)))
    return StreamedSources(tuple(found), integer_weights([weight for _, weight in items]))

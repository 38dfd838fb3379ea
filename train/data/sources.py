"""The data sources that --data names, one or several with weights; the format follows from the file name.

notes/                     the text files, .jsonl and .parquet files of a folder (train.data.records)
chats.jsonl:3,books/:1     three of every four rows from the first source
tokenized/                 a folder of .npy shards of token ids (train.data.token_shards), made by --init's tokenizer
s3://bucket/notes          files behind a URL, which are streamed (train.data.stream)
mine.py:texts              a function that makes an iterable of texts, which is streamed
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from train.imported import absolute, is_import_path

from . import corpus, records, token_shards
from .corpus import Corpus

LIBRARY = "the Python standard library"
# "3", "0.25", "5e-1", "1/3": the exponent and the digits are bounded, as Fraction computes with any number of them.
_URL = re.compile(r"[a-z][a-z0-9+.-]*(://|::).")
_WEIGHT = re.compile(r"([0-9]{1,9}\.?[0-9]{0,9}|\.[0-9]{1,9})([eE][+-]?[0-9])?|[0-9]{1,20}/[0-9]{1,20}")
_NUMBER = re.compile(r"[+-]?(?=\.?[0-9])[0-9_]*(\.[0-9_]*)?([eE][+-]?[0-9_]+|/[0-9_]+)?")  # what is meant as a weight


@dataclass(frozen=True)
class Source:
    """One source: a corpus of texts or conversations, or shards of token ids at `path` where `text` is None."""

    name: str
    weight: Fraction
    text: Corpus | None
    path: Path | None = None


@dataclass(frozen=True)
class DataSources:
    """All sources of a run. No train document of one may be held out by another: see `exclude_heldout`."""

    sources: tuple[Source, ...]

    @property
    def skipped(self) -> tuple[str, ...]:
        """`Corpus.skipped` of all sources, prefixed with the source's name where there are several."""
        several = len(self.sources) > 1
        return tuple(
            f"{source.name}: {entry}" if several else entry for source, text in self._texts() for entry in text.skipped
        )

    @property
    def duplicates(self) -> int:
        return sum(text.duplicates for _, text in self._texts())

    @property
    def train(self) -> tuple[corpus.CorpusDocument, ...]:
        """All train documents, from which a new tokenizer is trained; without sources of token ids."""
        return tuple(document for _, text in self._texts() for document in text.train)

    @property
    def fingerprint(self) -> str:
        """A hash of all texts; that of token ids is computed with the tokenizer (train.data.tokenized)."""
        return "-".join(corpus.fingerprint(text) for _, text in self._texts())

    @property
    def weights(self) -> tuple[int, ...]:
        """The weights as the smallest integers in the same proportions."""
        return integer_weights([source.weight for source in self.sources])

    @property
    def train_texts(self) -> Iterator[str]:
        """The texts from which a new tokenizer is trained."""
        return (document.text for document in self.train)

    @property
    def chat_sources(self) -> tuple[str, ...]:
        """The names of the sources of conversations."""
        return tuple(source.name for source, text in self._texts() if text.is_chat)

    @property
    def token_sources(self) -> tuple[str, ...]:
        """The names of the sources of token ids."""
        return tuple(source.name for source in self.sources if source.text is None)

    def _texts(self) -> Iterator[tuple[Source, Corpus]]:
        return ((source, source.text) for source in self.sources if source.text is not None)


def integer_weights(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """The weights as the smallest integers in the same proportions."""
    unit = Fraction(gcd(*(w.numerator for w in weights)), lcm(*(w.denominator for w in weights)))
    return tuple(int(weight / unit) for weight in weights)


def read_sources(data: str | None, *, without: Path | None = None, strict: bool = False) -> DataSources:
    """Reads the sources that `data` names (train.data.corpus.read_corpus); token ids are opened later. UserError."""
    if data is None:
        found: list[tuple[Path | None, Fraction]] = [(None, Fraction(1))]
    else:
        if items := streamed(data):
            raise UserError(f"--data {items[0]} is not read into memory: it is a stream")
        found = [(Path(item), weight) for item, weight in parse_sources(data)]
    return DataSources(
        exclude_heldout(
            Source(
                str(path or LIBRARY),
                weight,
                None
                if path and token_shards.is_shards(path)
                else corpus.read_corpus(path, without=without, strict=strict),
                path,
            )
            for path, weight in found
        )
    )


def exclude_heldout(sources: Iterable[Source]) -> tuple[Source, ...]:
    """Removes train documents that another source holds out. UserError where a source has none left."""
    sources = tuple(sources)
    heldout = {document.text for source in sources if source.text for document in source.text.heldout}

    def filtered(source: Source) -> Source:
        if source.text is None:
            return source
        train = tuple(document for document in source.text.train if document.text not in heldout)
        if not train:
            raise UserError(f"{source.name}: another source holds out all of its train documents")
        duplicates = source.text.duplicates + len(source.text.train) - len(train)
        return replace(source, text=replace(source.text, train=train, duplicates=duplicates))

    return tuple(map(filtered, sources))


def combine(texts: DataSources | Source | Iterable[Source]) -> DataSources:
    """One or several sources as what a run trains on. UserError where one is left with nothing to train on."""
    if isinstance(texts, DataSources):
        return texts
    return DataSources(exclude_heldout([texts] if isinstance(texts, Source) else texts))


def of_dataset(dataset: Any, name: str = "dataset", *, weight: Fraction | int = 1, strict: bool = False) -> Source:
    """A Hugging Face dataset, or any sequence of dicts with `text` or `messages`. UserError as in `read_sources`."""
    named = ((name, record) for record in records.read_dataset(dataset))
    return Source(name, Fraction(weight), corpus.corpus_from_records(named, f"the {name}", strict=strict))


def parse_sources(data: str) -> list[tuple[Path | str, Fraction]]:
    """[(path, weight)] of "a.jsonl:3,b/:0.5", default weight 1. An existing path is taken as one, whatever is in it.

    A URL and an import path are given as texts.
    """
    if _exists(Path(data)):
        return [(Path(data), Fraction(1))]
    found: list[tuple[Path | str, Fraction]] = []
    for item in data.split(","):
        name, _, number = item.rpartition(":")
        weight = _weight(number) if name and _NUMBER.fullmatch(number) else None
        name = item if weight is None else name
        path = name if is_streamed(name) else Path(name)
        if not item or weight == 0:
            raise UserError(
                f"--data {data:.200}: {item!r:.80} is not PATH or PATH:WEIGHT with a weight above 0 of at most 9 digits"
            )
        found.append((path, Fraction(1) if weight is None else weight))
    return found


def is_url(value: object) -> bool:
    """Whether a source is named by a URL."""
    return type(value) is str and _URL.match(value) is not None


def is_streamed(name: str) -> bool:
    """Whether a source is of the kind that is never read into memory: a URL, or a function by its import path."""
    return is_url(name) or (is_import_path(name) and not _exists(Path(name)))


def streamed(data: str | None) -> tuple[str, ...]:
    """The sources of --data that are never read into memory."""
    return tuple(item for item, _ in parse_sources(data or os.curdir) if isinstance(item, str))


def _weight(number: str) -> Fraction:
    """The weight, or 0 where it is none."""
    try:
        return Fraction(number) if _WEIGHT.fullmatch(number) else Fraction(0)
    except ZeroDivisionError:
        return Fraction(0)


def absolute_paths(data: str, base: Path = Path()) -> str:
    """`data` with absolute paths; relative ones are resolved against `base`."""
    if _exists(base / data):
        return os.path.realpath(base / data)
    found = [(_absolute(item, base), weight) for item, weight in parse_sources(data)]
    return ",".join(path if weight == 1 else f"{path}:{weight}" for path, weight in found)


def _absolute(item: Path | str, base: Path) -> str:
    if isinstance(item, Path):
        return os.path.realpath(base / item)
    return item if is_url(item) else absolute(item, base)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a long list of sources exceeds the limit of a file name
        return False

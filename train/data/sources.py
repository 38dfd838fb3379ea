"""What --data names: one source of text or several with weights, each read by what its name ends with.

notes/                     the text files, .jsonl and .parquet files below a folder; or conversations, see
train.data.records
talks.jsonl:3,books/:1     of every four rows, three from the first
tokenized/                 a folder of .npy shards (train.data.token_shards), made by the tokenizer of --init
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError

from . import corpus, token_shards
from .corpus import Corpus

LIBRARY = "the Python standard library"


@dataclass(frozen=True)
class Source:
    """Texts or conversations, or where `text` is None the shards of token ids at `path`."""

    name: str
    weight: Fraction
    text: Corpus | None
    path: Path | None = None


@dataclass(frozen=True)
class Texts:
    sources: tuple[Source, ...]

    @property
    def skipped(self) -> tuple[str, ...]:
        """As in a Corpus; of several sources, with the name of each."""
        several = len(self.sources) > 1
        return tuple(
            f"{source.name}: {what}" if several else what for source, text in self._texts() for what in text.skipped
        )

    @property
    def copies(self) -> int:
        return sum(text.copies for _, text in self._texts())

    @property
    def train(self) -> tuple[corpus.Document, ...]:
        """What a tokenizer can be made of, where no source is of another kind than texts."""
        return tuple(document for _, text in self._texts() for document in text.train)

    @property
    def fingerprint(self) -> str:
        """Of the texts; that of token ids is known when a tokenizer is."""
        return "-".join(corpus.fingerprint(text) for _, text in self._texts())

    @property
    def weights(self) -> tuple[int, ...]:
        """The smallest whole numbers in the proportions of the weights."""
        weights = [source.weight for source in self.sources]
        unit = Fraction(gcd(*(w.numerator for w in weights)), lcm(*(w.denominator for w in weights)))
        return tuple(int(weight / unit) for weight in weights)

    @property
    def conversations(self) -> tuple[str, ...]:
        """The names of the sources that hold some."""
        return tuple(source.name for source, text in self._texts() if text.is_chat)

    @property
    def ids(self) -> tuple[str, ...]:
        """The names of the sources that hold token ids."""
        return tuple(source.name for source in self.sources if source.text is None)

    def _texts(self) -> Iterator[tuple[Source, Corpus]]:
        return ((source, source.text) for source in self.sources if source.text is not None)


def load(data: str | None, *, without: Path | None = None, strict: bool = False) -> Texts:
    """Read what `data` names, token ids only later; see train.data.corpus.load. UserError names what is wrong."""
    found = [(None, Fraction(1))] if data is None else parse(data)
    return Texts(
        apart(
            Source(
                str(path or LIBRARY),
                weight,
                None if path and token_shards.is_shards(path) else corpus.load(path, without=without, strict=strict),
                path,
            )
            for path, weight in found
        )
    )


def apart(sources: Iterable[Source]) -> tuple[Source, ...]:
    """The same, where no source learns from a document that another holds out. UserError where nothing is left."""
    found = tuple(sources)
    heldout = {document.text for source in found if source.text for document in source.text.heldout}

    def rest(source: Source) -> Source:
        if source.text is None:
            return source
        train = tuple(document for document in source.text.train if document.text not in heldout)
        if not train:
            raise UserError(f"{source.name}: all that there is to learn from is held out by another source")
        copies = source.text.copies + len(source.text.train) - len(train)
        return replace(source, text=replace(source.text, train=train, copies=copies))

    return tuple(map(rest, found))


def of_dataset(dataset: Any, name: str = "dataset", *, weight: Fraction | int = 1, strict: bool = False) -> Source:
    """A Hugging Face dataset as a source, see train.data.corpus.of_dataset; a run learns `Texts(apart([it, ...]))`."""
    return Source(name, Fraction(weight), corpus.of_dataset(dataset, name, strict=strict))


def parse(data: str) -> list[tuple[Path | None, Fraction]]:
    """[(path, weight)] of "a.jsonl:3,b/:0.5"; without a number the weight is 1. A name that exists is no list."""
    if _exists(Path(data)):
        return [(Path(data), Fraction(1))]
    found: list[tuple[Path | None, Fraction]] = []
    for item in data.split(","):
        name, _, number = item.rpartition(":")
        try:
            weight = Fraction(number) if name else None
        except (ValueError, ZeroDivisionError):
            weight = None
        path = Path(item if weight is None else name)
        if not item or (weight is not None and weight <= 0):
            raise UserError(f"--data {data}: {item!r} is not PATH or PATH:WEIGHT with a weight above 0")
        found.append((path, Fraction(1) if weight is None else weight))
    return found


def absolute(data: str, base: Path = Path()) -> str:
    """The same with paths that do not depend on the working folder; relative ones are relative to `base`."""
    if _exists(base / data):
        return os.path.realpath(base / data)
    found = [(os.path.realpath(base / path), weight) for path, weight in parse(data) if path]
    return ",".join(path if weight == 1 else f"{path}:{weight}" for path, weight in found)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a long list is too long for a name
        return False

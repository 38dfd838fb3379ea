"""The text that a language model is trained on, in memory or as a stream: its batches and its held-out part."""

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from fnmodels.errors import UserError, printable
from fnmodels.files import open_append, read_text
from train.batch import Entries
from train.data import encoder, mixture, sources, tokenized
from train.data.chat import Template
from train.data.corpus import CorpusDocument
from train.data.rows import all_rows, concatenated, pack_stream
from train.data.sources import DataSources
from train.data.stream import StreamMixture
from train.data.stream.documents import beginning
from train.data.stream.mixture import StreamOptions
from train.data.stream.sources import StreamedSources, open_sources
from train.imported import Imported
from train.job import run_folder
from train.job.progress import tokenizing
from train.job.settings import Settings

DEFAULT_WINDOW = 1024  # rows of a stream's shuffle window
FAULTS = 1000  # records in skipped.txt, at most, of a stream
Texts = DataSources | StreamedSources


@dataclass(frozen=True)
class TextData:
    """The text of a run.

    Attributes:
        fingerprint: What resuming must find unchanged.
        heldout: All held-out rows.
        heldout_bytes: The bytes of text that their targets decode to.
        zlib_bytes: The size of that text as one zlib -9 stream per source.
        targets, target_bytes: Target tokens and the bytes that they decode to, of the train text, or of the held-out
            text of a stream: how a loss becomes bits per byte.
        size: What there is to train on, in words.
        fill: The fraction of the rows' tokens that are not padding.
        first: The first document that is trained, which samples continue; None: there are token ids alone.
        batch: (step) -> the batch of a step.
        epochs: (steps) -> {source: passes over it}.
        position: (steps) -> what a saved step needs beside the number of steps; None: nothing.
        skipped, duplicates: What was left out.
    """

    fingerprint: str
    heldout: Entries
    heldout_bytes: int
    zlib_bytes: int
    targets: int
    target_bytes: int
    size: str
    fill: float
    first: CorpusDocument | None
    batch: Callable[[int], Entries]
    epochs: Callable[[int], dict[str, float]]
    position: Callable[[int], Any]
    skipped: tuple[str, ...] = ()
    duplicates: int = 0


def read_texts(path: Path, settings: Settings) -> Texts:
    """The texts that --data names: read into memory, or opened as a stream. UserError where they cannot be read."""
    if not is_stream(settings):
        return sources.read_sources(settings.data, without=path, strict=settings.broken == "stop")
    return open_sources(str(settings.data), lambda item: Imported(item, "--data").function, without=path)


def is_stream(settings: Settings) -> bool:
    """Whether the text is streamed: by --stream, or for what --data names."""
    return settings.stream is not None or bool(sources.streamed(settings.data))


def check_settings(settings: Settings) -> None:
    """UserError for a stream of the default text, or where a source is absent."""
    if settings.stream is not None and settings.data is None:
        raise UserError(f"--stream {settings.stream} is for text that --data names: the default text is in memory")
    for item, _ in [] if settings.data is None else sources.parse_sources(settings.data):
        if isinstance(item, Path) and not item.exists():
            raise UserError(f"--data {item}: there is no such file or folder")
        if isinstance(item, str) and not sources.is_url(item):
            _ = Imported(item, "--data").function


def in_memory(
    texts: DataSources,
    tokenizer: Tokenizer,
    end: int | None,
    vocab_size: int,
    template: Template | None,
    settings: Settings,
    length: int,
) -> TextData:
    """Text in memory, tokenized. UserError as `tokenized.tokenize`, or where it does not fill a held-out row."""
    strict = settings.broken == "stop"
    with tokenizing() as show:
        dataset = tokenized.tokenize(
            texts, tokenizer, end, vocab_size, length=length, template=template, strict=strict, show=show
        )
    check_heldout_length(dataset, length, settings.data)
    rows = tokenized.make_mixture(dataset, length)
    return TextData(
        fingerprint=dataset.fingerprint,
        heldout=tokenized.heldout_batch(dataset, length),
        heldout_bytes=dataset.heldout.bytes,
        zlib_bytes=dataset.zlib_bytes,
        targets=dataset.train.target_count,
        target_bytes=dataset.train.bytes,
        size=f"{dataset.train.bytes / 1e6:.2f} MB to train on",
        fill=rows.fill,
        first=next((text for text in texts.train if not _is_among(text, dataset.skipped)), None),
        batch=lambda step: mixture.batch(rows, settings.seed, step, settings.batch_rows),
        epochs=lambda steps: mixture.epochs(rows, steps, settings.batch_rows),
        position=lambda steps: None,
        skipped=texts.skipped + dataset.skipped,
        duplicates=texts.duplicates,
    )


def _is_among(text: CorpusDocument, skipped: Sequence[str]) -> bool:
    return any(f"{text.name} (" in reason for reason in skipped)


def as_stream(
    path: Path,
    texts: StreamedSources,
    tokenizer: Tokenizer,
    end: int | None,
    settings: Settings,
    length: int,
    position: Any,
) -> TextData:
    """Text that is read while the run trains.

    Args:
        path: The run folder, where skipped.txt lists records that are left out.
        texts: The sources.
        tokenizer: Of the run.
        end: The id that ends a document.
        settings: Of the run.
        length: Tokens of a row.
        position: Where a resumed run continues, as `TextData.position` returned it; None: at the beginning.

    Returns:
        The text.

    Raises:
        UserError: The held-out text does not fill a row.
    """
    own = Tokenizer.from_str(tokenizer.to_str())  # of the thread: encoding sets its options

    def encode(documents: list[str]) -> tuple[Any, Any]:
        return encoder.encode(own, documents, end)

    held = [concatenated(*encode(list(documents))) for documents in texts.heldout]
    rows = [all_rows(pack_stream(tokens, length)) for tokens in held]
    size = sum(len(text.encode("utf-8")) for documents in texts.heldout for text in documents)
    tokens = sum(source.total for source in held)
    if tokens < length:
        raise UserError(
            f"too little text in {settings.data}: the part of it that is held out is {tokens} tokens and not the "
            f"{length} of one row: leave --stream out"
        )
    options = StreamOptions(length, settings.stream or DEFAULT_WINDOW, settings.seed, settings.batch_rows)
    stream = StreamMixture(texts.sources, texts.weights, encode, options, fault_log(path, settings.broken == "stop"))
    if position is not None:
        stream.seek(position)
    compressed = [zlib.compress("".join(documents).encode("utf-8"), 9) for documents in texts.heldout]
    return TextData(
        fingerprint=texts.fingerprint,
        heldout=tokenized.joined(rows),
        heldout_bytes=size,
        zlib_bytes=sum(map(len, compressed)),
        targets=tokens,
        target_bytes=size,
        size="a stream" if texts.size is None else f"a stream of {texts.size / 1e6:,.2f} MB",
        fill=1.0,
        first=CorpusDocument("", beginning(texts.sources[0])),
        batch=stream.batch,
        epochs=stream.epochs,
        position=stream.position,
    )


def fault_log(path: Path, strict: bool) -> Callable[[str], None]:
    """A function that notes a record which is left out in skipped.txt; with `strict` it raises UserError."""
    file = path / run_folder.SKIPPED
    seen = set(read_text(file).splitlines()) if os.path.lexists(file) else set()

    def report(fault: str) -> None:
        line = printable(fault).replace("\n", "\\n")
        if strict:
            raise UserError(f"a record of the stream cannot be read: {line}")
        if line in seen or len(seen) >= FAULTS:
            return
        if not seen:
            print(f"skipped a record: {line}; it and others are in {file}", flush=True)
        seen.add(line)
        with open_append(file) as lines:
            lines.write(f"{line}\n")

    return report


def check_heldout_length(dataset: tokenized.Dataset, length: int, source: str | None) -> None:
    """UserError where the held-out text does not fill one row: its bits per byte would be meaningless."""
    tokens, size = dataset.heldout.total, dataset.train.bytes + dataset.heldout.bytes
    if tokens < length:
        kilobytes = -(-size * length // (tokens * 1000))
        raise UserError(
            f"too little text in {source or 'the standard library'}: of its {size:,} bytes "
            f"{dataset.heldout.bytes:,} are held out, which are {tokens} tokens and not the {length} of one row: "
            f"give about {kilobytes} kB or more"
        )

"""What a run learns from and is held against, as token ids: texts tokenized, or read as they were before."""

import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from train import shards
from train.cache import cached
from train.corpus import Corpus, fingerprint, text_of
from train.errors import UserError
from train.mixture import Mixture
from train.rows import Batch, Tokens, everything, in_line, stream
from train.sources import Texts
from train.workers import Show, encode


@dataclass(frozen=True, eq=False)
class Part:
    """One part of every source, and the bytes of text it stands for."""

    sources: tuple[Tokens, ...]
    bytes: int

    @property
    def total(self) -> int:
        return sum(tokens.total for tokens in self.sources)


@dataclass(frozen=True, eq=False)
class Dataset:
    """`zlib_bytes` is the size of the held-out documents, those of each source as one zlib -9 stream."""

    names: tuple[str, ...]
    weights: tuple[int, ...]
    train: Part
    heldout: Part
    zlib_bytes: int
    fingerprint: str  # of all texts and token ids and their split, the same wherever the files lie


@dataclass(frozen=True, eq=False)
class Halves:
    """One source."""

    train: Tokens
    heldout: Tokens
    sizes: tuple[int, int, int]  # bytes of text in train, in heldout, in the zlib stream of heldout
    fingerprint: str


def tokenized(
    texts: Texts,
    tokenizer: Tokenizer,
    end: int | None,
    vocab_size: int,
    *,
    workers: int | None = None,
    show: Show | None = None,
) -> Dataset:
    """All sources as token ids, made by `workers` processes (see train.workers) where no cache has them.

    UserError where the ids of a source are none of `vocab_size` entries.
    """
    halves = [
        of_text(source.text, tokenizer, end, workers, show)
        if source.text
        else of_shards(source.path, tokenizer, end, vocab_size)
        for source in texts.sources
    ]
    train_bytes, heldout_bytes, zlib_bytes = map(sum, zip(*(half.sizes for half in halves), strict=True))
    return Dataset(
        names=tuple(source.name for source in texts.sources),
        weights=texts.weights,
        train=Part(tuple(half.train for half in halves), train_bytes),
        heldout=Part(tuple(half.heldout for half in halves), heldout_bytes),
        zlib_bytes=zlib_bytes,
        fingerprint="-".join(half.fingerprint for half in halves),
    )


def mixture(dataset: Dataset, length: int) -> Mixture:
    """Rows of `length` tokens to learn from. UserError where a source has not one token."""
    for name, tokens in zip(dataset.names, dataset.train.sources, strict=True):
        if not tokens.total:
            raise UserError(f"{name} has nothing to learn from")
    rows = tuple(stream(tokens, length) for tokens in dataset.train.sources)
    return Mixture(dataset.names, rows, dataset.weights)


def heldout(dataset: Dataset, length: int) -> Batch:
    """All held-out rows of all sources, [R,S]."""
    batches = [everything(stream(tokens, length)) for tokens in dataset.heldout.sources]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def of_text(
    corpus: Corpus, tokenizer: Tokenizer, end: int | None, workers: int | None = None, show: Show | None = None
) -> Halves:
    """From the cache where an equal corpus met an equal tokenizer before."""
    known_as = fingerprint(corpus)
    settings = f"1 {known_as} {end} {tokenizer.to_str()}"

    def write(path: Path) -> None:
        documents, count = corpus.train + corpus.heldout, len(corpus.train)
        ids, lengths = encode(tokenizer, [document.text for document in documents], end, workers=workers, show=show)
        at = int(lengths[:count].sum())
        arrays = {"train.ids": ids[:at], "train.lengths": lengths[:count]}
        arrays |= {"heldout.ids": ids[at:], "heldout.lengths": lengths[count:]}
        heldout = text_of(corpus.heldout)
        sizes = [len(text_of(corpus.train)), len(heldout), len(zlib.compress(heldout, 9))]
        save_file(arrays | {"sizes": np.array(sizes)}, path)

    def read(path: Path) -> Halves:
        arrays = load_file(path)
        train, heldout = (in_line(arrays[f"{name}.ids"], arrays[f"{name}.lengths"]) for name in ("train", "heldout"))
        train_bytes, heldout_bytes, zlib_bytes = arrays["sizes"].tolist()
        return Halves(train, heldout, (train_bytes, heldout_bytes, zlib_bytes), known_as)

    return cached(f"tokens-{hashlib.sha256(settings.encode()).hexdigest()[:32]}.safetensors", write, read)


def of_shards(path: Path | None, tokenizer: Tokenizer, end: int | None, vocab_size: int) -> Halves:
    """The bytes to learn from are estimated by those held out: all the text there may be is never made."""
    assert path is not None
    found = shards.load(path, vocab_size=vocab_size, end=end)
    train, heldout = shards.hold_out(found.tokens)
    ids = (heldout.read(number, 0, int(length)).tolist() for number, length in enumerate(heldout.lengths))
    text = "".join(tokenizer.decode_batch(list(ids))).encode("utf-8")
    size = train.total * len(text) // max(1, heldout.total)
    return Halves(train, heldout, (size, len(text), len(zlib.compress(text, 9))), found.fingerprint)

"""What a run learns from and is held against, as token ids: texts tokenized, or read as they were before."""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from fnmodels.errors import UserError
from train.command_line import check_installed

from . import token_shards
from .cache import cached
from .chat import Template, nothing_left, read_template, talks
from .corpus import Corpus, Document, fingerprint, text_of
from .encoder import Talk
from .encoder_pool import Show, encode, encode_talks
from .mixture import Mixture
from .rows import Batch, Rows, Tokens, beginnings, everything, in_line, stream, whole
from .sources import Source, Texts


@dataclass(frozen=True, eq=False)
class Part:
    """One part of every source, and the bytes of text that its targets stand for."""

    sources: tuple[Tokens, ...]
    bytes: int

    @property
    def total(self) -> int:
        return sum(tokens.total for tokens in self.sources)

    @property
    def learning(self) -> int:
        """How many of the tokens are targets: of conversations, what the assistant says."""
        return sum(tokens.learning for tokens in self.sources)


@dataclass(frozen=True, eq=False)
class Dataset:
    """`zlib_bytes` is the size of the held-out documents, those of each source as one zlib -9 stream."""

    names: tuple[str, ...]
    weights: tuple[int, ...]
    train: Part
    heldout: Part
    zlib_bytes: int
    fingerprint: str  # of all texts and token ids and their split, the same wherever the files lie
    skipped: tuple[str, ...] = ()  # conversations that the template or the length of a row leaves nothing of


@dataclass(frozen=True, eq=False)
class Halves:
    """One source."""

    train: Tokens
    heldout: Tokens
    sizes: tuple[int, int, int]  # bytes of text in train, in heldout, in the zlib stream of heldout
    fingerprint: str
    skipped: tuple[str, ...] = ()


def tokenized(
    texts: Texts,
    tokenizer: Tokenizer,
    end: int | None,
    vocab_size: int,
    *,
    length: int | None = None,
    template: Template | None = None,
    strict: bool = False,
    workers: int | None = None,
    show: Show | None = None,
) -> Dataset:
    """All sources as token ids, made by `workers` processes (see train.data.encoder_pool) where no cache has them.

    Conversations need a `template`, and the `length` of a row, at which they are cut. UserError where the ids of a
    source are none of `vocab_size` entries; with `strict` also for a conversation that would be skipped.
    """

    def halves_of(source: Source) -> Halves:
        if source.text is None:
            return of_shards(source, tokenizer, end, vocab_size)
        if not source.text.is_chat:
            return of_text(source.text, tokenizer, end, workers, show)
        if template is None or length is None:
            raise UserError(f"{source.name} holds conversations, which need a chat template and the length of a row")
        return of_chats(source.text, tokenizer, template, length, workers, show)

    halves = [halves_of(source) for source in texts.sources]
    skipped = tuple(what for half in halves for what in half.skipped)
    if strict and skipped:
        raise UserError(f"{len(skipped)} conversations cannot be learnt from: {skipped[0]}")
    train_bytes, heldout_bytes, zlib_bytes = map(sum, zip(*(half.sizes for half in halves), strict=True))
    return Dataset(
        names=tuple(source.name for source in texts.sources),
        weights=texts.weights,
        train=Part(tuple(half.train for half in halves), train_bytes),
        heldout=Part(tuple(half.heldout for half in halves), heldout_bytes),
        zlib_bytes=zlib_bytes,
        fingerprint="-".join(half.fingerprint for half in halves),
        skipped=skipped,
    )


def template_for(texts: Texts, folder: Path, day: str | None = None) -> Template | None:
    """The chat template of a checkpoint folder, where there are conversations. UserError where it has none.

    A template that tells the day tells `day`, or without it today's, whenever it is rendered.
    """
    if not texts.conversations:
        return None
    check_installed(("jinja2",))


    template = read_template(folder)
    return replace(template, day=day or date.today().isoformat()) if template.tells_the_day else template


def mixture(dataset: Dataset, length: int) -> Mixture:
    """Rows of `length` tokens to learn from, conversations whole. UserError where a source has not one token."""
    for name, tokens in zip(dataset.names, dataset.train.sources, strict=True):
        if not tokens.total:
            raise UserError(f"{name} has nothing to learn from")
    rows = tuple(rows_of(tokens, length) for tokens in dataset.train.sources)
    return Mixture(dataset.names, rows, dataset.weights)


def heldout(dataset: Dataset, length: int) -> Batch:
    """All held-out rows of all sources, [R,S]."""
    batches = [everything(rows_of(tokens, length)) for tokens in dataset.heldout.sources]
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def rows_of(tokens: Tokens, length: int) -> Rows:
    return stream(tokens, length) if tokens.learnt is None else whole(tokens, length)


def of_text(
    corpus: Corpus, tokenizer: Tokenizer, end: int | None, workers: int | None = None, show: Show | None = None
) -> Halves:
    """From the cache where an equal corpus met an equal tokenizer before."""
    known_as = fingerprint(corpus)
    settings = f"2 {known_as} {end} {tokenizer.to_str()}"

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


def of_shards(source: Source, tokenizer: Tokenizer, end: int | None, vocab_size: int) -> Halves:
    """The bytes to learn from are estimated by those held out: all the text there may be is never made."""
    assert source.path is not None
    found = token_shards.load(source.path, vocab_size=vocab_size, end=end)
    train, heldout = token_shards.hold_out(found.tokens)
    ids = (heldout.read(number, 0, int(length)).tolist() for number, length in enumerate(heldout.lengths))
    text = "".join(tokenizer.decode_batch(list(ids))).encode("utf-8")
    size = train.total * len(text) // max(1, heldout.total)
    return Halves(train, heldout, (size, len(text), len(zlib.compress(text, 9))), found.fingerprint)


def of_chats(
    corpus: Corpus,
    tokenizer: Tokenizer,
    template: Template,
    length: int,
    workers: int | None = None,
    show: Show | None = None,
) -> Halves:
    """From the cache, as texts are. The bytes are those of what the assistant says, which is all that is learnt."""
    known_as = hashlib.sha256(f"{fingerprint(corpus)} {template}".encode()).hexdigest()
    settings = f"2 {known_as} {length} {tokenizer.to_str()}"

    def write(path: Path) -> None:
        arrays: dict[str, np.ndarray] = {}
        said: list[bytes] = []
        skipped: list[str] = []
        for name, part in (("train", corpus.train), ("heldout", corpus.heldout)):
            tokens, faults = talks_of(part, tokenizer, template, length, workers, show)
            skipped += faults
            if not len(tokens.lengths) or tokens.learnt is None:
                raise UserError(f"too few conversations to learn from and to hold some out (skipped: {skipped[0]})")
            arrays |= {f"{name}.ids": tokens.parts[0], f"{name}.learnt": tokens.learnt}
            arrays |= {f"{name}.begins": tokens.begins, f"{name}.lengths": tokens.lengths}
            targets = np.concatenate([tokens.targets(n, 0, length) for n in range(len(tokens.lengths))])
            said.append(tokenizer.decode(targets[targets >= 0].tolist(), skip_special_tokens=False).encode("utf-8"))
        sizes = [*map(len, said), len(zlib.compress(said[-1], 9))]
        told = np.frombuffer(json.dumps(skipped).encode(), np.uint8)
        save_file(arrays | {"sizes": np.array(sizes), "skipped": told}, path)

    def read(path: Path) -> Halves:
        found = load_file(path)
        train, heldout = (
            Tokens((found[f"{name}.ids"],), *(found[f"{name}.{what}"] for what in ("begins", "lengths", "learnt")))
            for name in ("train", "heldout")
        )
        train_bytes, heldout_bytes, zlib_bytes = found["sizes"].tolist()
        skipped = tuple(json.loads(found["skipped"].tobytes()))
        return Halves(train, heldout, (train_bytes, heldout_bytes, zlib_bytes), known_as, skipped)

    return cached(f"chats-{hashlib.sha256(settings.encode()).hexdigest()[:32]}.safetensors", write, read)


def talks_of(
    documents: tuple[Document, ...],
    tokenizer: Tokenizer,
    template: Template,
    length: int,
    workers: int | None,
    show: Show | None,
) -> tuple[Tokens, list[str]]:
    """Conversations, cut after `length` tokens, and "name (reason)" of each that leaves nothing to learn."""


    skipped: list[str] = []
    names: list[str] = []
    rendered: list[Talk] = []
    for document in documents:
        try:
            found = talks(template, document.messages or (), tools=list(document.tools) or None)
        except UserError as error:
            skipped.append(f"{document.name} ({error})")
            continue
        rendered += found
        names += [document.name] * len(found)
    ids, lengths, learnt = encode_talks(tokenizer, rendered, workers=workers, show=show)
    tokens, kept = beginnings(in_line(ids, lengths, learnt), length)
    left = {names[number] for number in kept}
    for name, size in zip(names, lengths.tolist(), strict=True):
        if name not in left:
            left.add(name)  # one conversation may be several examples
            skipped.append(f"{name} ({nothing_left(min(length, size), size)})")
    return tokens, skipped

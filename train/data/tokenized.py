"""Tokenizes all data sources of a run into train and held-out token ids, cached on disk."""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from fnmodels.errors import UserError
from train.batch import Entries
from train.command_line import check_installed

from . import token_shards
from .cache import cached
from .chat import Template, no_targets_message, read_template, render_examples
from .corpus import Corpus, CorpusDocument, concatenated_bytes, fingerprint
from .encoder import RenderedChat
from .encoder_pool import PoolOptions, encode, encode_chats
from .mixture import Mixture
from .rows import Rows, Tokens, all_rows, concatenated, pack_documents, pack_stream, truncate_documents
from .sources import DataSources, Source, combine
from .turns.said import refuse_media


@dataclass(frozen=True, eq=False)
class Split:
    """The train or held-out tokens of every source, and the bytes of text that their targets decode to."""

    sources: tuple[Tokens, ...]
    bytes: int

    @property
    def total(self) -> int:
        return sum(tokens.total for tokens in self.sources)

    @property
    def target_count(self) -> int:
        """The number of target tokens: in conversations, those of the assistant."""
        return sum(tokens.target_count for tokens in self.sources)


@dataclass(frozen=True, eq=False)
class Dataset:
    """All sources of a run, tokenized. zlib_bytes: the held-out text's size as one zlib -9 stream per source."""

    names: tuple[str, ...]
    weights: tuple[int, ...]
    train: Split
    heldout: Split
    zlib_bytes: int
    fingerprint: str  # a hash of all texts and token ids and their split, independent of file names
    skipped: tuple[str, ...] = ()  # conversations without a target: refused by the template, or cut by the row


@dataclass(frozen=True, eq=False)
class TokenizedSource:
    """One source, tokenized and split."""

    train: Tokens
    heldout: Tokens
    sizes: tuple[int, int, int]  # bytes of the train text, the held-out text, and the latter's zlib stream
    fingerprint: str
    skipped: tuple[str, ...] = ()


def tokenize(
    texts: DataSources | Source | Iterable[Source],
    tokenizer: Tokenizer,
    end: int | None,
    vocab_size: int,
    *,
    length: int | None = None,
    template: Template | None = None,
    strict: bool = False,
    **pool: Unpack[PoolOptions],
) -> Dataset:
    """All sources as token ids, from the cache or made in the processes of train.data.encoder_pool.

    end: the end-of-text id, appended to each text. Conversations need a `template` and the `length` of a row, to which
    they are truncated. UserError where ids are outside of `vocab_size`, and with `strict` also for a conversation that
    would be skipped.
    """

    def tokenize_source(source: Source) -> TokenizedSource:
        if source.text is None:
            return read_shards(source, tokenizer, end, vocab_size)
        if not source.text.is_chat:
            return tokenize_texts(source.text, tokenizer, end, **pool)
        if template is None or length is None:
            raise UserError(f"{source.name} holds conversations, which need a chat template and the length of a row")
        return tokenize_chats(source.text, tokenizer, template, length, **pool)

    texts = combine(texts)
    tokenized = [tokenize_source(source) for source in texts.sources]
    for source, tokens in zip(texts.sources, tokenized, strict=True):
        if source.text is not None:  # ids of files are checked where they are read
            _check_ids(source.name, tokens, tokenizer, vocab_size)
    skipped = tuple(entry for source in tokenized for entry in source.skipped)
    if strict and skipped:
        raise UserError(f"{len(skipped)} conversations cannot be trained on: {skipped[0]}")
    train_bytes, heldout_bytes, zlib_bytes = map(sum, zip(*(source.sizes for source in tokenized), strict=True))
    return Dataset(
        names=tuple(source.name for source in texts.sources),
        weights=texts.weights,
        train=Split(tuple(source.train for source in tokenized), train_bytes),
        heldout=Split(tuple(source.heldout for source in tokenized), heldout_bytes),
        zlib_bytes=zlib_bytes,
        fingerprint="-".join(source.fingerprint for source in tokenized),
        skipped=skipped,
    )


def _check_ids(name: str, source: TokenizedSource, tokenizer: Tokenizer, vocab_size: int) -> None:
    """UserError for an added token of the tokenizer that the model has no row of."""
    for ids in chain(source.train.arrays, source.heldout.arrays):
        highest = int(ids.max(initial=-1))
        if highest >= vocab_size:
            raise UserError(
                f"{name} has the token {tokenizer.id_to_token(highest)!r} ({highest}), and the model's vocabulary has "
                f"{vocab_size} entries: take a tokenizer or chat template without it, or a model with more rows "
                "(params.resize_vocab)"
            )


def template_for(texts: DataSources, folder: Path, day: str | None = None) -> Template | None:
    """The chat template of a checkpoint folder, None without conversations. UserError where it has none.

    A template that writes a date gets `day` (ISO), by default today's, for as long as the run lasts.
    """
    if not texts.chat_sources:
        return None
    check_installed(("jinja2",))
    template = read_template(folder)
    return replace(template, day=day or date.today().isoformat()) if template.uses_date else template


def make_mixture(dataset: Dataset, length: int) -> Mixture:
    """The train rows of `length` tokens of all sources. UserError where a source has no train token."""
    for name, tokens in zip(dataset.names, dataset.train.sources, strict=True):
        if not tokens.total:
            raise UserError(f"{name} has no train token")
    rows = tuple(pack_rows(tokens, length) for tokens in dataset.train.sources)
    return Mixture(dataset.names, rows, dataset.weights)


def heldout_batch(dataset: Dataset, length: int) -> Entries:
    """All held-out rows of all sources as one batch, [R, S]."""
    return joined([all_rows(pack_rows(tokens, length)) for tokens in dataset.heldout.sources])


def joined(batches: Sequence[Entries]) -> Entries:
    """The rows of all batches, in their order."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def pack_rows(tokens: Tokens, length: int) -> Rows:
    """Texts are packed as one stream, conversations (which have a loss mask) whole."""
    return pack_stream(tokens, length) if tokens.loss_mask is None else pack_documents(tokens, length)


def tokenize_texts(
    corpus: Corpus, tokenizer: Tokenizer, end: int | None, **pool: Unpack[PoolOptions]
) -> TokenizedSource:
    """A corpus of texts as token ids, cached by the hashes of the corpus and the tokenizer."""
    known_as = fingerprint(corpus)

    def make() -> TokenizedSource:
        texts, count = [document.text for document in corpus.train + corpus.heldout], len(corpus.train)
        ids, lengths = encode(tokenizer, texts, end, **pool)
        at, heldout = int(lengths[:count].sum()), concatenated_bytes(corpus.heldout)
        sizes = (len(concatenated_bytes(corpus.train)), len(heldout), len(zlib.compress(heldout, 9)))
        train, held = concatenated(ids[:at], lengths[:count]), concatenated(ids[at:], lengths[count:])
        return TokenizedSource(train, held, sizes, known_as)

    return _cached("tokens", f"2 {known_as} {end} {tokenizer.to_str()}", known_as, make)


def _cached(kind: str, key: str, known_as: str, make: Callable[[], TokenizedSource]) -> TokenizedSource:
    """`make()` from the cache. key: what it depends on; known_as: its fingerprint."""

    def write(path: Path) -> None:
        source = make()
        arrays = {"sizes": np.array(source.sizes), "skipped": np.frombuffer(json.dumps(source.skipped).encode(), "u1")}
        for name, tokens in (("train", source.train), ("heldout", source.heldout)):
            arrays |= {f"{name}.ids": tokens.arrays[0], f"{name}.lengths": tokens.lengths}
            arrays[f"{name}.begins"] = tokens.begins
            if tokens.loss_mask is not None:
                arrays[f"{name}.learnt"] = tokens.loss_mask
        save_file(arrays, path)

    def read(path: Path) -> TokenizedSource:
        arrays = load_file(path)

        def tokens(name: str) -> Tokens:
            ids, begins, lengths = (arrays[f"{name}.{field}"] for field in ("ids", "begins", "lengths"))
            return Tokens((ids,), begins, lengths, arrays.get(f"{name}.learnt"))

        train_bytes, heldout_bytes, zlib_bytes = arrays["sizes"].tolist()
        skipped = tuple(json.loads(arrays["skipped"].tobytes()))
        sizes = (train_bytes, heldout_bytes, zlib_bytes)
        return TokenizedSource(tokens("train"), tokens("heldout"), sizes, known_as, skipped)

    return cached(f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors", write, read)


def read_shards(source: Source, tokenizer: Tokenizer, end: int | None, vocab_size: int) -> TokenizedSource:
    """A source of token ids. The bytes of the train text are estimated from the held-out text, to avoid decoding it."""
    assert source.path is not None
    shards = token_shards.open_shards(source.path, vocab_size=vocab_size, end=end)
    train, heldout = token_shards.split_heldout(shards.tokens)
    ids = (heldout.read(number, 0, int(length)).tolist() for number, length in enumerate(heldout.lengths))
    text = "".join(tokenizer.decode_batch(list(ids))).encode("utf-8")
    size = train.total * len(text) // max(1, heldout.total)
    return TokenizedSource(train, heldout, (size, len(text), len(zlib.compress(text, 9))), shards.fingerprint)


def tokenize_chats(
    corpus: Corpus, tokenizer: Tokenizer, template: Template, length: int, **pool: Unpack[PoolOptions]
) -> TokenizedSource:
    """Conversations as token ids, cached as texts are. The sizes count the assistant's text only, the targets."""
    known_as = hashlib.sha256(f"{fingerprint(corpus)} {template}".encode()).hexdigest()

    def make() -> TokenizedSource:
        found: list[Tokens] = []
        texts: list[bytes] = []
        skipped: list[str] = []
        for documents in (corpus.train, corpus.heldout):
            tokens, faults = encode_conversations(documents, tokenizer, template, length, **pool)
            skipped += faults
            if not len(tokens.lengths):
                raise UserError(f"too few conversations to train on some and hold out others (skipped: {skipped[0]})")
            found.append(tokens)
            targets = np.concatenate([tokens.targets(n, 0, length) for n in range(len(tokens.lengths))])
            texts.append(tokenizer.decode(targets[targets >= 0].tolist(), skip_special_tokens=False).encode("utf-8"))
        sizes = (len(texts[0]), len(texts[1]), len(zlib.compress(texts[1], 9)))
        return TokenizedSource(found[0], found[1], sizes, known_as, tuple(skipped))

    return _cached("chats", f"4 {known_as} {length} {tokenizer.to_str()}", known_as, make)


def encode_conversations(
    documents: tuple[CorpusDocument, ...],
    tokenizer: Tokenizer,
    template: Template,
    length: int,
    **pool: Unpack[PoolOptions],
) -> tuple[Tokens, list[str]]:
    """Conversations truncated to `length` tokens, and "name (reason)" of each one left without a target."""
    skipped: list[str] = []
    names: list[str] = []
    rendered: list[RenderedChat] = []
    for document in documents:
        try:
            refuse_media(document.messages or ())
            examples = render_examples(template, document.messages or (), tools=list(document.tools) or None)
        except UserError as error:
            skipped.append(f"{document.name} ({error})")
            continue
        rendered += examples
        names += [document.name] * len(examples)
    ids, lengths, loss_mask = encode_chats(tokenizer, rendered, **pool)
    tokens, kept = truncate_documents(concatenated(ids, lengths, loss_mask), length)
    covered = {names[number] for number in kept}
    for name, size in zip(names, lengths.tolist(), strict=True):
        if name not in covered:
            covered.add(name)  # one conversation may be several examples
            skipped.append(f"{name} ({no_targets_message(min(length, size), size)})")
    return tokens, skipped

"""Tokenized text as rows of packed documents, and the batch of a step as a pure function of (seed, step).

B rows of a batch, S tokens of a row, R rows in all.
"""

import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from torch import Tensor

from fnmodels.packing import pack
from train.cache import cached
from train.corpus import Corpus, Document, fingerprint, text_of
from train.tokenizer import encode_documents

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Tokens:
    """One part of the corpus: all documents in one line, where each ends, and the bytes of text they stand for."""

    ids: Tensor  # int64 [T]
    lengths: Tensor  # int64 [N]
    bytes: int


@dataclass(frozen=True)
class Dataset:
    """`zlib_bytes` is the size of the held-out documents as one zlib -9 stream."""

    train: Tokens
    heldout: Tokens
    zlib_bytes: int


def tokenized(corpus: Corpus, tokenizer: Tokenizer, end: int | None) -> Dataset:
    """The corpus as token ids, from the cache where an equal corpus met an equal tokenizer before."""
    settings = f"1 {fingerprint(corpus)} {end} {tokenizer.to_str()}"

    def write(path: Path) -> None:
        arrays: dict[str, np.ndarray] = {}
        for name, part in (("train", corpus.train), ("heldout", corpus.heldout)):
            ids, lengths = encode(part, tokenizer, end)
            arrays |= {f"{name}.ids": ids, f"{name}.lengths": lengths}
        heldout = text_of(corpus.heldout)
        sizes = [len(text_of(corpus.train)), len(heldout), len(zlib.compress(heldout, 9))]
        save_file(arrays | {"sizes": np.array(sizes)}, path)

    return cached(f"tokens-{hashlib.sha256(settings.encode()).hexdigest()[:32]}.safetensors", write, read)


def encode(documents: tuple[Document, ...], tokenizer: Tokenizer, end: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 [T] of all documents in one line, and the length of each int64 [N]."""
    encoded = encode_documents(tokenizer, [document.text for document in documents], end)
    return (
        np.concatenate([np.array(ids, np.int32) for ids in encoded]),
        np.array([len(ids) for ids in encoded]),
    )


def read(path: Path) -> Dataset:
    with safe_open(path, framework="pt") as file:
        train_bytes, heldout_bytes, zlib_bytes = file.get_tensor("sizes").tolist()
        train, heldout = (
            Tokens(file.get_tensor(f"{name}.ids").long(), file.get_tensor(f"{name}.lengths"), size)
            for name, size in (("train", train_bytes), ("heldout", heldout_bytes))
        )
    return Dataset(train, heldout, zlib_bytes)


def rows(tokens: Tokens, length: int) -> Batch:
    """All documents as one stream cut into rows [R,S]; no target is lost where a row's end cuts a document."""
    packed = pack(tokens.ids.split(tokens.lengths.tolist()), length)
    return {
        "tokens": packed.tokens,
        "positions": restart(packed.segment_ids),
        "segment_ids": packed.segment_ids,
        "labels": packed.labels,
    }


def restart(segment_ids: Tensor) -> Tensor:
    """Positions [R,S] counted from the start of each piece of a document.

    The packer counts from the start of the document. What is attended to begins with the piece, and positions beyond
    the row's length would mislead a rotary scaling that looks at them.
    """
    columns = torch.arange(segment_ids.shape[1]).expand_as(segment_ids)
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    start = torch.where(begins, columns, 0).cummax(dim=1).values
    return (columns - start).masked_fill(segment_ids <= 0, 0)


def take(rows: Batch, indices: Tensor) -> Batch:
    return {name: tensor[indices] for name, tensor in rows.items()}


def order(count: int, seed: int, step: int, batch_rows: int) -> Tensor:
    """The rows of one step's batch (steps from 0): every epoch permutes all rows anew, and a batch may span two."""
    epochs: dict[int, np.ndarray] = {}
    picked = []
    for sample in range(step * batch_rows, (step + 1) * batch_rows):
        epoch, place = divmod(sample, count)
        if epoch not in epochs:
            epochs[epoch] = np.random.default_rng([seed, epoch]).permutation(count)
        picked.append(int(epochs[epoch][place]))
    return torch.tensor(picked)

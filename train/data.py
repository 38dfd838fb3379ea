"""The corpus as token ids, from the cache where an equal corpus met an equal tokenizer before."""

import hashlib
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from train.cache import cached
from train.corpus import Corpus, Document, fingerprint, text_of
from train.rows import Tokens, in_line
from train.tokenizer import encode_documents


@dataclass(frozen=True, eq=False)
class Part:
    """One part of the corpus, and the bytes of text it stands for."""

    tokens: Tokens
    bytes: int


@dataclass(frozen=True, eq=False)
class Dataset:
    """`zlib_bytes` is the size of the held-out documents as one zlib -9 stream."""

    train: Part
    heldout: Part
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
    with safe_open(path, framework="numpy") as file:
        train_bytes, heldout_bytes, zlib_bytes = file.get_tensor("sizes").tolist()
        train, heldout = (
            Part(in_line(file.get_tensor(f"{name}.ids"), file.get_tensor(f"{name}.lengths")), size)
            for name, size in (("train", train_bytes), ("heldout", heldout_bytes))
        )
    return Dataset(train, heldout, zlib_bytes)

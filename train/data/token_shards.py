"""Text that was tokenized before: .npy files of token ids, memory-mapped, so that a corpus may be larger than memory.

A shard is one line of ids (uint8, uint16, uint32, int32 or int64). Where `NAME.lengths.npy` lies beside `NAME.npy`, it
says how long its documents are, in order; else each end-of-text id ends a document, which it belongs to. No document
goes on in the next shard. A folder's shards are read in the order of their names.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from fnmodels.errors import UserError

from .cache import cached
from .rows import Tokens
from .sampling import permuted

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
LENGTHS = ".lengths.npy"
AT_ONCE = 1 << 24  # ids looked at
HELD_OUT_SHARE, HELD_OUT_MOST = 0.05, 1 << 20  # of the documents; tokens
FEW_DOCUMENTS = 100  # fewer are too few to judge by some of them


@dataclass(frozen=True, eq=False)
class Shards:
    """The documents of a folder and a hash of all ids and lengths, the same wherever the files lie."""

    tokens: Tokens
    fingerprint: str


def is_shards(path: Path) -> bool:
    """An .npy file, or a folder that holds some and nothing else, hidden files and .json aside."""
    if not path.is_dir():
        return path.suffix == ".npy"
    suffixes = {file.suffix for file in path.iterdir() if file.is_file() and not file.name.startswith(".")}
    return ".npy" in suffixes and suffixes <= {".npy", ".json"}


def load(path: Path, *, vocab_size: int, end: int | None) -> Shards:
    """A file or a folder of shards, every id checked once per version of a file. UserError names file and place."""
    files = sorted(file for file in path.iterdir() if file.suffix == ".npy") if path.is_dir() else [path]
    shards = [file for file in files if not file.name.endswith(LENGTHS)]
    for file in files:
        if file.name.endswith(LENGTHS) and path.is_dir() and _shard_of(file) not in shards:
            raise UserError(f"{file} has no shard: there is no {_shard_of(file).name} beside it")
    if not shards:
        raise UserError(f"{path}: there is no shard (NAME.npy)")
    whole, parts, begins, lengths = hashlib.sha256(), [], [], []
    offset = 0
    for file in shards:
        ids = _mapped(file)
        found, digest = _look_through(file, ids, vocab_size, end)
        begins.append(offset + found.cumsum() - found)
        lengths.append(found)
        parts.append(ids)
        offset += len(ids)
        whole.update(digest)
    return Shards(Tokens(tuple(parts), np.concatenate(begins), np.concatenate(lengths)), whole.hexdigest())


def hold_out(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """(to learn from, held out): documents chosen by number, not too many; of few documents, the tail of each."""
    count, lengths = len(tokens.lengths), tokens.lengths
    if count < FEW_DOCUMENTS:
        heads = (lengths * (1 - 2 * HELD_OUT_SHARE)).astype(np.int64)
        return (
            Tokens(tokens.parts, tokens.begins, heads),
            Tokens(tokens.parts, tokens.begins + heads, lengths - heads),
        )
    ranked = permuted(np.arange(round(count * HELD_OUT_SHARE)), count, 0)
    some = ranked[: max(1, int(np.searchsorted(lengths[ranked].cumsum(), HELD_OUT_MOST, "right")))]
    heldout = np.isin(np.arange(count), some)
    return (
        Tokens(tokens.parts, tokens.begins[~heldout], lengths[~heldout]),
        Tokens(tokens.parts, tokens.begins[heldout], lengths[heldout]),
    )


def _shard_of(lengths: Path) -> Path:
    return lengths.with_name(lengths.name.removesuffix(LENGTHS) + ".npy")


def _mapped(file: Path) -> np.ndarray:
    """The ids of a shard, not read yet. UserError where they are not ids, or the file is not as long as it says."""
    try:
        with open(file, "rb") as opened:
            version = np.lib.format.read_magic(opened)
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = read_header(opened)
            begin = opened.tell()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except Exception as error:  # numpy reads the header as Python's syntax, with all the ways in which that can fail
        raise UserError(f"{file} is not an .npy file, or its beginning is damaged: {error}") from error
    if dtype not in DTYPES or len(shape) != 1:
        raise UserError(f"{file} holds {dtype} of shape {shape}: a shard is one line of {', '.join(DTYPES)}")
    if shape[0] == 0:
        raise UserError(f"{file} holds no ids")
    there, said = file.stat().st_size, begin + shape[0] * dtype.itemsize
    if there != said:
        what = "is cut short" if there < said else "has more bytes than it says"
        raise UserError(f"{file} {what}: {shape[0]} ids of {dtype} make it {said} bytes long, and it has {there}")
    return np.memmap(file, dtype, "r", begin, shape)


def _look_through(file: Path, ids: np.ndarray, vocab_size: int, end: int | None) -> tuple[np.ndarray, bytes]:
    """(lengths of the documents, a hash of ids and lengths), from the cache where it was looked through before."""
    beside = file.with_name(file.stem + LENGTHS)
    there = [(path, path.stat()) for path in (file, beside) if path.exists()]
    versions = [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in there]
    key = hashlib.sha256(repr(("1", versions, vocab_size, end)).encode()).hexdigest()[:32]

    def write(path: Path) -> None:
        lengths, digest = _documents(file, beside, ids, vocab_size, end)
        save_file({"lengths": lengths, "digest": np.frombuffer(digest, np.uint8)}, path)

    def read(path: Path) -> tuple[np.ndarray, bytes]:
        arrays = load_file(path)
        return arrays["lengths"], arrays["digest"].tobytes()

    return cached(f"shard-{key}.safetensors", write, read)


def _documents(file: Path, beside: Path, ids: np.ndarray, vocab_size: int, end: int | None) -> tuple[np.ndarray, bytes]:
    digest, ends = hashlib.sha256(str(ids.dtype).encode()), []
    for begin in range(0, len(ids), AT_ONCE):
        some = np.asarray(ids[begin : begin + AT_ONCE])
        wrong = np.flatnonzero((some < 0) | (some >= vocab_size))
        if len(wrong):
            raise UserError(
                f"{file}: id number {begin + int(wrong[0])} is {some[wrong[0]]}, and the vocabulary has {vocab_size} "
                "entries: another tokenizer made it than the model's, or the file is damaged"
            )
        digest.update(some.tobytes())
        if end is not None:
            ends.append(begin + 1 + np.flatnonzero(some == end))
    if beside.exists():
        lengths = _lengths(beside, len(ids))
    else:
        stops = np.concatenate([*ends, [len(ids)]]).astype(np.int64)
        lengths = np.diff(stops, prepend=0)
        lengths = lengths[lengths > 0]  # a shard that ends with an end has no document after it
    digest.update(lengths.tobytes())
    return lengths, digest.digest()


def _lengths(file: Path, total: int) -> np.ndarray:
    try:
        lengths = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{file} is not an .npy file, or damaged: {error}") from error
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or (lengths < 0).any():
        raise UserError(f"{file} holds {lengths.dtype} of shape {lengths.shape}: lengths are one line of whole numbers")
    if int(lengths.sum()) != total:
        raise UserError(f"{file}: the lengths add up to {int(lengths.sum())}, and the shard has {total} ids")
    return lengths.astype(np.int64)

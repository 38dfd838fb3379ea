"""Memory-mapped .npy shards of token ids: pre-tokenized corpora that may be larger than memory.

A shard is a 1-D array of ids (uint8, uint16, uint32, int32 or int64). `NAME.lengths.npy` beside `NAME.npy` holds the
lengths of its documents, in order; without it every end-of-text id ends a document and belongs to it. No document spans
two shards. The shards of a folder are read in the order of their names.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from fnmodels.errors import CheckpointError, UserError
from fnmodels.files import open_regular
from params.io.files import plain_file

from .cache import cached
from .corpus import FEW_DOCUMENTS, HELDOUT_FRACTION
from .rows import Tokens
from .sampling import permute

DTYPES = ("uint8", "uint16", "uint32", "int32", "int64")
LENGTHS = ".lengths.npy"
CHUNK_IDS = 1 << 24  # ids checked at a time
MAX_HELDOUT_TOKENS = 1 << 20


@dataclass(frozen=True, eq=False)
class Shards:
    """The documents of a folder, and a hash of all ids and lengths, independent of file names and folders."""

    tokens: Tokens
    fingerprint: str


def is_shards(path: Path) -> bool:
    """Whether this is an .npy file, or a folder of nothing but .npy, .json and hidden files."""
    if not path.is_dir():
        return path.suffix == ".npy"
    suffixes = {file.suffix for file in path.iterdir() if file.is_file() and not file.name.startswith(".")}
    return ".npy" in suffixes and suffixes <= {".npy", ".json"}


def open_shards(path: Path, *, vocab_size: int, end: int | None) -> Shards:
    """Opens a shard or a folder of shards; every id is checked once per version of a file. UserError names the file.

    UnsafePathError: a shard of the folder, or the lengths beside a shard, are a link that leads out or no regular file.
    """
    files = sorted(file for file in path.iterdir() if file.suffix == ".npy") if path.is_dir() else [path]
    shards = [file for file in files if not file.name.endswith(LENGTHS)]
    for file in files:
        if file.name.endswith(LENGTHS) and path.is_dir() and _shard_of(file) not in shards:
            raise UserError(f"{file} has no shard: there is no {_shard_of(file).name} beside it")
    if not shards:
        raise UserError(f"{path}: there is no shard (NAME.npy)")
    fingerprint, arrays, begins, lengths = hashlib.sha256(), [], [], []
    offset = 0
    for file in shards:
        if path.is_dir():
            plain_file(path, file.name)
        ids = _memmap(file)
        found, digest = _cached_lengths(file, ids, vocab_size, end)
        begins.append(offset + found.cumsum() - found)
        lengths.append(found)
        arrays.append(ids)
        offset += len(ids)
        fingerprint.update(digest)
    return Shards(Tokens(tuple(arrays), np.concatenate(begins), np.concatenate(lengths)), fingerprint.hexdigest())


def split_heldout(tokens: Tokens) -> tuple[Tokens, Tokens]:
    """(train, held-out): a pseudorandom choice of documents up to MAX_HELDOUT_TOKENS; of few documents, their tails."""
    count, lengths = len(tokens.lengths), tokens.lengths
    if count < FEW_DOCUMENTS:
        heads = (lengths * (1 - 2 * HELDOUT_FRACTION)).astype(np.int64)
        return (
            Tokens(tokens.arrays, tokens.begins, heads),
            Tokens(tokens.arrays, tokens.begins + heads, lengths - heads),
        )
    ranked = permute(np.arange(round(count * HELDOUT_FRACTION)), count, 0)
    chosen = ranked[: max(1, int(np.searchsorted(lengths[ranked].cumsum(), MAX_HELDOUT_TOKENS, "right")))]
    heldout = np.isin(np.arange(count), chosen)
    return (
        Tokens(tokens.arrays, tokens.begins[~heldout], lengths[~heldout]),
        Tokens(tokens.arrays, tokens.begins[heldout], lengths[heldout]),
    )


def _shard_of(lengths: Path) -> Path:
    return lengths.with_name(lengths.name.removesuffix(LENGTHS) + ".npy")


def _memmap(file: Path) -> np.ndarray:
    """The memory-mapped ids of a shard. UserError where dtype, shape or the size of the file is wrong."""
    ids = _mapped(file)
    if ids.dtype not in DTYPES:
        raise UserError(f"{file} holds {ids.dtype} of shape {ids.shape}: a shard is a 1-D array of {', '.join(DTYPES)}")
    if not len(ids):
        raise UserError(f"{file} holds no ids")
    return ids


def _mapped(file: Path) -> np.ndarray:
    """A 1-D array of an .npy file, mapped: its header is compared with the size before anything is allocated."""
    try:
        with os.fdopen(open_regular(file, follow=True), "rb") as opened:
            version = np.lib.format.read_magic(opened)
            read_header = (
                np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            )
            shape, _, dtype = read_header(opened)
            begin, size = opened.tell(), os.fstat(opened.fileno()).st_size
            if len(shape) != 1 or dtype.hasobject:
                raise UserError(f"{file} holds {dtype} of shape {shape}: it must be a 1-D array of whole numbers")
            expected = begin + shape[0] * dtype.itemsize
            if size != expected:
                problem = "is cut short" if size < expected else "has more bytes than its header says"
                text = f"{shape[0]} elements of {dtype} make it {expected} bytes long, and it has {size}"
                raise UserError(f"{file} {problem}: {text}")
            return np.memmap(opened, dtype, "r", begin, shape) if shape[0] else np.empty(0, dtype)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (UserError, CheckpointError):
        raise
    except Exception as error:  # numpy evaluates the header as Python literals, which fails in many ways
        raise UserError(f"{file} is not an .npy file, or its beginning is damaged: {error}") from error


def _cached_lengths(file: Path, ids: np.ndarray, vocab_size: int, end: int | None) -> tuple[np.ndarray, bytes]:
    """(lengths of the documents, a hash of ids and lengths), cached per version of the file."""
    beside = file.with_name(file.stem + LENGTHS)
    if os.path.lexists(beside):
        plain_file(beside.parent, beside.name)
    present = [(path, path.stat()) for path in (file, beside) if path.exists()]
    versions = [(str(path.resolve()), stat.st_size, stat.st_mtime_ns) for path, stat in present]
    key = hashlib.sha256(repr(("1", versions, vocab_size, end)).encode()).hexdigest()[:32]

    def write(path: Path) -> None:
        lengths, digest = _scan_documents(file, beside, ids, vocab_size, end)
        save_file({"lengths": lengths, "digest": np.frombuffer(digest, np.uint8)}, path)

    def read(path: Path) -> tuple[np.ndarray, bytes]:
        arrays = load_file(path)
        return arrays["lengths"], arrays["digest"].tobytes()

    return cached(f"shard-{key}.safetensors", write, read)


def _scan_documents(
    file: Path, beside: Path, ids: np.ndarray, vocab_size: int, end: int | None
) -> tuple[np.ndarray, bytes]:
    digest, ends = hashlib.sha256(str(ids.dtype).encode()), []
    for begin in range(0, len(ids), CHUNK_IDS):
        chunk = np.asarray(ids[begin : begin + CHUNK_IDS])
        wrong = np.flatnonzero((chunk < 0) | (chunk >= vocab_size))
        if len(wrong):
            raise UserError(
                f"{file}: id number {begin + int(wrong[0])} is {chunk[wrong[0]]}, and the vocabulary has {vocab_size} "
                "entries: the file was made by another tokenizer than the model's, or is damaged"
            )
        digest.update(chunk.tobytes())
        if end is not None:
            ends.append(begin + 1 + np.flatnonzero(chunk == end))
    if beside.exists():
        lengths = _lengths(beside, len(ids))
    else:
        stops = np.concatenate([*ends, [len(ids)]]).astype(np.int64)
        lengths = np.diff(stops, prepend=0)
        lengths = lengths[lengths > 0]  # no empty document after a final end-of-text id
    digest.update(lengths.tobytes())
    return lengths, digest.digest()


def _lengths(file: Path, total: int) -> np.ndarray:
    lengths = _mapped(file)
    if lengths.dtype.kind not in "iu":
        raise UserError(f"{file} holds {lengths.dtype}: lengths are a 1-D array of whole numbers")
    wrong = np.flatnonzero((lengths < 0) | (lengths > total))
    if len(wrong):
        text = f"{file}: length number {int(wrong[0])} is {lengths[wrong[0]]}, and the shard has {total} ids"
        raise UserError(text)
    found = lengths.astype(np.int64)
    summed = sum(int(found[begin : begin + 1024].sum()) for begin in range(0, len(found), 1024))  # never wraps around
    if summed != total:
        raise UserError(f"{file}: the lengths add up to {summed}, and the shard has {total} ids")
    return found

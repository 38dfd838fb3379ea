"""Tokenization in a pool of worker processes; the result does not depend on their number."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from queue import SimpleQueue
from typing import IO, TypedDict, Unpack

import numpy as np
from tokenizers import Tokenizer

from . import encoder
from .encoder import RenderedChat

GROUP_CHARACTERS = 1 << 20  # characters sent to a worker at once; a longer text is not split
CHARACTERS_PER_WORKER = 4 << 20  # fewer characters than this do not pay for starting a process

ProgressCallback = Callable[[int, int], None]  # (characters done, characters in total)
Arrays = tuple[np.ndarray, ...]


class PoolOptions(TypedDict, total=False):
    """workers: 1 is this process alone; None takes as many as there are processors, fewer for little text."""

    workers: int | None
    show: ProgressCallback | None


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], end: int | None, **pool: Unpack[PoolOptions]
) -> tuple[np.ndarray, np.ndarray]:
    """`train.data.encoder.encode` in several processes: ids int32 [T] of all texts and their lengths int64 [N].

    RuntimeError where a worker dies. Any exception raised here, Ctrl-C included, ends all workers.
    """
    ids, lengths = _encode(tokenizer, "texts", end, texts, [len(text) for text in texts], **pool)
    return ids, lengths


def encode_chats(
    tokenizer: Tokenizer, chats: Sequence[RenderedChat], **pool: Unpack[PoolOptions]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`train.data.encoder.encode_chats` in several processes, as `encode`: ids, lengths and loss masks."""
    ids, lengths, loss_mask = _encode(tokenizer, "chats", None, chats, [len(text) for text, _ in chats], **pool)
    return ids, lengths, loss_mask


def _encode(
    tokenizer: Tokenizer,
    kind: str,
    end: int | None,
    items: Sequence,
    sizes: list[int],
    workers: int | None = None,
    show: ProgressCallback | None = None,
) -> Arrays:
    total, done = sum(sizes), 0
    if workers is None:
        workers = max(1, min(os.cpu_count() or 1, total // CHARACTERS_PER_WORKER))
    if workers < 1:
        raise ValueError(f"workers is {workers}: it must be at least 1")
    groups = _groups(sizes)
    found: list[Arrays] = []
    with _encoders(tokenizer, kind, end, min(workers, len(groups))) as encode_all:
        for group, arrays in zip(groups, encode_all([items[group] for group in groups]), strict=True):
            found.append(arrays)
            done += sum(sizes[group])
            if show:
                show(done, total)
    return tuple(map(np.concatenate, zip(*found, strict=True)))


def _groups(sizes: list[int]) -> list[slice]:
    """Splits items into consecutive groups of about GROUP_CHARACTERS characters; one empty group for no items."""
    ends, size = [0], 0
    for number, item_size in enumerate(sizes, 1):
        size += item_size
        if size >= GROUP_CHARACTERS:
            ends.append(number)
            size = 0
    if size or len(ends) == 1:
        ends.append(len(sizes))
    return [slice(begin, end) for begin, end in pairwise(ends)]


@contextmanager
def _encoders(
    tokenizer: Tokenizer, kind: str, end: int | None, workers: int
) -> Iterator[Callable[[list[Sequence]], Iterator[Arrays]]]:
    """Yields a function that encodes groups of items, in order, in `workers` processes."""
    if workers <= 1:
        yield lambda groups: (encoder.encode_items(tokenizer, kind, end, group) for group in groups)
        return
    processes: list[subprocess.Popen] = []
    idle: SimpleQueue[subprocess.Popen] = SimpleQueue()

    def encode_group(group: Sequence) -> Arrays:
        process = idle.get()
        try:
            encoder.send(_pipe(process.stdin), group)
            return _received(_pipe(process.stdout))
        except (OSError, ValueError) as error:
            raise RuntimeError(
                f"a tokenizer process ended with exit code {process.wait()} before its work was done"
            ) from error
        finally:
            idle.put(process)

    pool = ThreadPoolExecutor(workers)
    try:
        for _ in range(workers):
            processes.append(_start(tokenizer, kind, end))
            idle.put(processes[-1])
        yield lambda groups: pool.map(encode_group, groups)
    finally:
        for process in processes:  # all results have arrived, or an exception makes them useless
            process.kill()
        pool.shutdown(cancel_futures=True)
        for process in processes:
            process.wait()
            _pipe(process.stdout).close()
            with suppress(BrokenPipeError):  # a partial message may be in the buffer
                _pipe(process.stdin).close()


def _start(tokenizer: Tokenizer, kind: str, end: int | None) -> subprocess.Popen:
    """A worker in its own session: Ctrl-C reaches only the parent, which ends it; it also ends when the parent dies."""
    process = subprocess.Popen(
        [sys.executable, "-P", encoder.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,
    )
    encoder.send(_pipe(process.stdin), (tokenizer.to_str(), kind, end))
    return process


def _received(pipe: IO[bytes]) -> Arrays:
    """The arrays that a worker sent by `encoder.send`. ValueError where they end early."""
    forms = [(np.dtype(name), size) for name, size in json.loads(pipe.readline())]
    arrays = [np.frombuffer(pipe.read(size * dtype.itemsize), dtype) for dtype, size in forms]
    if [len(array) for array in arrays] != [size for _, size in forms]:
        raise ValueError("the arrays of a worker end early")
    return tuple(arrays)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe

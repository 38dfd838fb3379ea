"""Tokenization in several processes. What comes out does not depend on how many there are."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import pairwise
from queue import SimpleQueue
from typing import IO

import numpy as np
from tokenizers import Tokenizer

from . import encoder
from .encoder import Talk

AT_ONCE = 1 << 20  # characters that a process is given; a longer text is not cut
WORTH_A_PROCESS = 4 << 20  # characters, below which starting one takes longer than it saves

Show = Callable[[int, int], None]  # (characters done, of how many)
Arrays = tuple[np.ndarray, ...]


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], end: int | None, *, workers: int | None = None, show: Show | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 [T] of all texts in one line, and how many each has, int64 [N]; see train.data.encoder.encode.

    `workers` processes; 1 is this one alone, None as many as there are processors and the text is worth. RuntimeError
    where a process ends before its work does. An exception that arrives here, Ctrl-C included, ends them all.
    """
    ids, lengths = _encode(tokenizer, "texts", end, texts, [len(text) for text in texts], workers, show)
    return ids, lengths


def encode_talks(
    tokenizer: Tokenizer, talks: Sequence[Talk], *, workers: int | None = None, show: Show | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The same of rendered conversations, and what is learnt of them, bool [T]; see train.data.encoder.encode_talks."""
    ids, lengths, learnt = _encode(tokenizer, "talks", None, talks, [len(text) for text, _ in talks], workers, show)
    return ids, lengths, learnt


def _encode(
    tokenizer: Tokenizer,
    kind: str,
    end: int | None,
    items: Sequence,
    sizes: list[int],
    workers: int | None,
    show: Show | None,
) -> Arrays:
    total, done = sum(sizes), 0
    if workers is None:
        workers = max(1, min(os.cpu_count() or 1, total // WORTH_A_PROCESS))
    if workers < 1:
        raise ValueError(f"workers is {workers}: there is at least 1")
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
    """Items one after the other, of AT_ONCE characters or little more; one group where there is none."""
    ends, size = [0], 0
    for number, more in enumerate(sizes, 1):
        size += more
        if size >= AT_ONCE:
            ends.append(number)
            size = 0
    if size or len(ends) == 1:
        ends.append(len(sizes))
    return [slice(begin, end) for begin, end in pairwise(ends)]


@contextmanager
def _encoders(
    tokenizer: Tokenizer, kind: str, end: int | None, workers: int
) -> Iterator[Callable[[list[Sequence]], Iterator[Arrays]]]:
    """A function that encodes groups of items, in order."""
    if workers <= 1:
        yield lambda groups: (encoder.answer(tokenizer, kind, end, group) for group in groups)
        return
    processes: list[subprocess.Popen] = []
    idle: SimpleQueue[subprocess.Popen] = SimpleQueue()

    def ask(group: Sequence) -> Arrays:
        process = idle.get()
        try:
            _tell(process, group)
            return pickle.load(_pipe(process.stdout))
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise RuntimeError(f"a process that tokenizes ended with {process.wait()} before its work did") from error
        finally:
            idle.put(process)

    pool = ThreadPoolExecutor(workers)
    try:
        for _ in range(workers):
            processes.append(_start(tokenizer, kind, end))
            idle.put(processes[-1])
        yield lambda groups: pool.map(ask, groups)
    finally:
        for process in processes:  # all answers are here, or nobody waits for them any more
            process.kill()
        pool.shutdown(cancel_futures=True)
        for process in processes:
            process.wait()
            _pipe(process.stdout).close()
            with suppress(BrokenPipeError):  # half a question may be in the buffer
                _pipe(process.stdin).close()


def _start(tokenizer: Tokenizer, kind: str, end: int | None) -> subprocess.Popen:
    """A process of its own session: Ctrl-C is for this one, which ends it; it also ends where this one is killed."""
    process = subprocess.Popen(
        [sys.executable, "-P", encoder.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,
    )
    _tell(process, (tokenizer.to_str(), kind, end))
    return process


def _tell(process: subprocess.Popen, message: object) -> None:
    pipe = _pipe(process.stdin)
    pickle.dump(message, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe

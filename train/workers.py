"""Tokenization in several processes. What comes out does not depend on how many there are."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import IO

import numpy as np
from tokenizers import Tokenizer

from train import encoder

AT_ONCE = 1 << 20  # characters that a process is given; a longer text is not cut
WORTH_A_PROCESS = 4 << 20  # characters, below which starting one takes longer than it saves

Show = Callable[[int, int], None]  # (characters done, of how many)
Arrays = tuple[np.ndarray, np.ndarray]


def encode(
    tokenizer: Tokenizer, texts: Sequence[str], end: int | None, *, workers: int | None = None, show: Show | None = None
) -> Arrays:
    """Ids int32 [T] of all texts in one line, and how many each has, int64 [N]; see train.encoder.encode.

    `workers` processes; 1 is this one alone, None as many as there are processors and the text is worth. RuntimeError
    where a process ends before its work does. An exception that arrives here, Ctrl-C included, ends them all.
    """
    total, done = sum(map(len, texts)), 0
    if workers is None:
        workers = max(1, min(os.cpu_count() or 1, total // WORTH_A_PROCESS))
    if workers < 1:
        raise ValueError(f"workers is {workers}: there is at least 1")
    groups = _groups(texts)
    found: list[Arrays] = []
    with _encoders(tokenizer, end, min(workers, len(groups))) as map_groups:
        for group, arrays in zip(groups, map_groups(groups), strict=True):
            found.append(arrays)
            done += sum(map(len, group))
            if show:
                show(done, total)
    ids, lengths = zip(*found, strict=True) if found else ((np.zeros(0, np.int32),), (np.zeros(0, np.int64),))
    return np.concatenate(ids), np.concatenate(lengths)


def _groups(texts: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = []
    size = AT_ONCE
    for text in texts:
        if size >= AT_ONCE:
            groups.append([])
            size = 0
        groups[-1].append(text)
        size += len(text)
    return groups


@contextmanager
def _encoders(
    tokenizer: Tokenizer, end: int | None, workers: int
) -> Iterator[Callable[[list[list[str]]], Iterator[Arrays]]]:
    """A function that encodes groups of texts, in order."""
    if workers <= 1:
        yield lambda groups: (encoder.encode(tokenizer, group, end) for group in groups)
        return
    processes: list[subprocess.Popen] = []
    idle: SimpleQueue[subprocess.Popen] = SimpleQueue()

    def ask(group: list[str]) -> Arrays:
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
            processes.append(_start(tokenizer, end))
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


def _start(tokenizer: Tokenizer, end: int | None) -> subprocess.Popen:
    """A process of its own session: Ctrl-C is for this one, which ends it; it also ends where this one is killed."""
    process = subprocess.Popen(
        [sys.executable, "-P", encoder.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        start_new_session=True,
    )
    _tell(process, (tokenizer.to_str(), end))
    return process


def _tell(process: subprocess.Popen, message: object) -> None:
    pipe = _pipe(process.stdin)
    pickle.dump(message, pipe, protocol=pickle.HIGHEST_PROTOCOL)
    pipe.flush()


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe

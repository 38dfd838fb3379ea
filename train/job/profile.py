"""Profiling of training steps with torch.profiler into a Chrome trace, for chrome://tracing or ui.perfetto.dev."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile

from params.io.files import write_atomic

TAIL_BYTES = 10_000  # bytes at the end of a complete trace, which contain its name after the last event
WARMUP_STEPS = 2  # unprofiled steps before, in which buffers are allocated and kernels chosen


@contextmanager
def profiled(path: Path, steps: int | None, remaining: int) -> Iterator[Callable[[], None]]:
    """Yields done(), to be called after every step; writes the trace of `steps` steps to `path` after the last of them.

    remaining: the steps left in the run; WARMUP_STEPS steps are skipped first where it allows. A run that stops earlier
    leaves the trace of the steps it made. steps None: no profiling.
    """
    if steps is None:
        yield lambda: None
        return
    profiler, done_steps = profile(), 0
    first = min(WARMUP_STEPS, max(remaining - steps, 0))
    last = min(first + steps, remaining)

    def export(temporary: Path) -> None:
        profiler.export_chrome_trace(str(temporary))  # which does not report a full disk as an exception
        if b'"traceName"' not in temporary.read_bytes()[-TAIL_BYTES:]:
            raise OSError(errno.ENOSPC, "The trace could not be written in full", str(path))

    def finish() -> None:
        profiler.stop()
        write_atomic(path, export)
        print(f"trace of {done_steps - first} steps: {path}")

    def done() -> None:
        nonlocal done_steps
        done_steps += 1
        if done_steps == first:
            profiler.start()
        elif done_steps == last:
            finish()

    if not first:
        profiler.start()
    try:
        yield done
    except BaseException:
        if first <= done_steps < last:
            profiler.stop()
        raise
    if first < done_steps < last:
        finish()
    elif done_steps <= first < last:
        if done_steps == first:
            profiler.stop()
        print("no trace: the run stopped before the steps to be profiled (--profile)")

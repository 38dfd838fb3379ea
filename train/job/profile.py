"""A profile of some steps as a chrome trace, for chrome://tracing or ui.perfetto.dev."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile

from params.io.files import write_atomic

LAST = 10_000  # bytes of a trace, in which its own name stands, and no more events
WARM = 2  # steps before, in which buffers are made and kernels chosen


@contextmanager
def traced(path: Path, steps: int | None, left: int) -> Iterator[Callable[[], None]]:
    """Yields done(), to be called after every step. The trace of `steps` steps is at `path` when they are made.

    The first WARM steps are passed over where so many are `left`. A run that stops earlier leaves the trace of what it
    made; None traces nothing.
    """
    if steps is None:
        yield lambda: None
        return
    profiler, made = profile(), 0
    first = min(WARM, max(left - steps, 0))
    last = min(first + steps, left)

    def export(temporary: Path) -> None:
        profiler.export_chrome_trace(str(temporary))  # which says of a full disk nothing that can be caught
        if b'"traceName"' not in temporary.read_bytes()[-LAST:]:
            raise OSError(errno.ENOSPC, "The trace could not be written in full", str(path))

    def finish() -> None:
        profiler.stop()
        write_atomic(path, export)
        print(f"trace of {made - first} steps: {path}")

    def done() -> None:
        nonlocal made
        made += 1
        if made == first:
            profiler.start()
        elif made == last:
            finish()

    if not first:
        profiler.start()
    try:
        yield done
    except BaseException:
        if first <= made < last:
            profiler.stop()
        raise
    if first < made < last:
        finish()
    elif made <= first < last:
        if made == first:
            profiler.stop()
        print("no trace: the run stopped before the steps that --profile was to have")

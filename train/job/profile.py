"""Profiling of training steps with torch.profiler into a Chrome trace, for chrome://tracing or ui.perfetto.dev."""

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch.profiler import ProfilerAction, profile

from fnmodels.files import write_atomic

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
    first = min(WARMUP_STEPS, max(remaining - steps, 0))
    last, complete = min(first + steps, remaining), False

    def action(step: int) -> ProfilerAction:
        if not first <= step < last:
            return ProfilerAction.NONE
        return ProfilerAction.RECORD if step + 1 < last else ProfilerAction.RECORD_AND_SAVE

    def write(profiler: profile, temporary: Path) -> None:
        profiler.export_chrome_trace(str(temporary))  # which does not report a full disk as an exception
        if b'"traceName"' not in temporary.read_bytes()[-TAIL_BYTES:]:
            raise OSError(errno.ENOSPC, "The trace could not be written in full", str(path))

    def export(profiler: profile) -> None:
        if profiler.step_num == last or (complete and profiler.step_num > first):
            write_atomic(path, partial(write, profiler))
            print(f"trace of {profiler.step_num - first} steps: {path}")

    with profile(schedule=action, on_trace_ready=export) as profiler:
        yield profiler.step
        complete = True  # without an exception
    if profiler.step_num <= first < last:
        print("no trace: the run stopped before the steps to be profiled (--profile)")

"""Runs contenders of one process in turn, A B C, A B C, ..., so that a slow minute of the machine hits all of them."""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from contenders import memory, reset_peak


def give_back_memory() -> None:
    """Restarts this program with a malloc that returns large buffers to the system at once; call it first.

    glibc adapts its threshold: freed buffers may then stay in the heap, where the next contender's peak is hidden by
    what the last one left.
    """
    wanted = {"MALLOC_MMAP_THRESHOLD_": "8388608", "MALLOC_TRIM_THRESHOLD_": "8388608"}
    if not wanted.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **wanted})


@dataclass(frozen=True)
class Taken:
    """Medians: seconds of wall and of CPU time (which a busy machine disturbs less), bytes above the start."""

    wall: float
    cpu: float
    peak: float


def take_turns(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Taken]:
    """Each contender's medians over the rounds, after one warm-up round."""
    taken: dict[str, list[Taken]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            gc.collect()
            reset_peak()
            resident, wall, cpu = memory("VmRSS"), time.perf_counter(), time.process_time()
            result = run()
            one = Taken(time.perf_counter() - wall, time.process_time() - cpu, memory("VmHWM") - resident)
            del result
            if turn:
                taken[name].append(one)
    return {
        name: Taken(*(statistics.median(getattr(one, field) for one in many) for field in ("wall", "cpu", "peak")))
        for name, many in taken.items()
    }

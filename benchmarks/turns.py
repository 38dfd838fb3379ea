"""Runs contenders of one process in turn, A B C, A B C, ..., so that a slow minute of the machine hits all of them."""

from __future__ import annotations

import ctypes
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
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
    """Medians of seconds of wall and of CPU time (which a busy machine disturbs less), and bytes above the start."""

    wall: float
    cpu: float
    peak: float


def take_turns(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Taken]:
    """Each contender's medians over the rounds; its peak is that of a run before, once free memory is given back."""
    gc.collect()
    gc.freeze()  # what is there stays: collecting garbage before each run does not look at it again
    peaks = {name: peak_of(run) for name, run in contenders.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            gc.collect()
            wall, cpu = time.perf_counter(), time.process_time()
            result = run()
            taken[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            del result
    return _medians(taken, peaks)


def take_turns_on_cuda(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Taken | str]:
    """`take_turns` on the device, with peaks of its memory; for a contender that does not run there, why."""
    peaks: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, run in contenders.items():
        try:
            peaks[name] = _peak_on_cuda(run)
        except torch.OutOfMemoryError:
            failed[name] = "does not fit"
        except Exception as error:  # a kernel may not have this dtype, or no backward on this device
            failed[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}".replace("|", "/")
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in peaks}
    for _ in range(rounds):
        for name, many in taken.items():
            gc.collect()
            torch.cuda.synchronize()
            wall, cpu = time.perf_counter(), time.process_time()
            contenders[name]()
            torch.cuda.synchronize()
            many.append((time.perf_counter() - wall, time.process_time() - cpu))
    medians = _medians(taken, peaks)
    return {name: failed.get(name) or medians[name] for name in contenders}


def _medians(taken: dict[str, list[tuple[float, float]]], peaks: dict[str, float]) -> dict[str, Taken]:
    return {
        name: Taken(*(statistics.median(kind) for kind in zip(*many, strict=True)), peak=peaks[name])
        for name, many in taken.items()
    }


def peak_of(run: Callable[[], Any]) -> float:
    """The bytes by which the peak of resident memory rises in a run, once free memory is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_peak()
    resident = memory("VmRSS")
    run()
    return memory("VmHWM") - resident


def _peak_on_cuda(run: Callable[[], Any]) -> float:
    for _ in range(3):  # kernels are compiled and tuned in the first runs, which takes memory too
        run()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - held

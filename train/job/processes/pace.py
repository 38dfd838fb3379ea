"""The speed of each process by itself: the time of a small piece of work, without waiting for other processes.

The steps of all ranks take equally long, because each waits for the slowest in every collective. So each rank times the
same product of matrices by itself from time to time, and rank 0 compares (`train.job.watch.slow_ranks`).
"""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

REPEATS = 5  # the fastest counts: another program may interrupt some of them


def product() -> None:
    """The work that is timed: about a millisecond of a core."""
    x = torch.ones(192, 192)
    for _ in range(4):
        x = x @ x / 192


def seconds_of_ranks(work: Callable[[], object] = product) -> list[float]:
    """The fastest of some repeats of `work`, for each rank. All ranks call it together."""
    dist.barrier()  # they measure at the same time, so that they share the machine as in a step
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    gathered: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(gathered, min(times))
    return gathered

"""The number of a process's computing threads: the cores it may use, shared among the processes of one machine.

Torch starts a thread for each core of the machine or of the process's affinity. A quota of its control group, as
containers have it, is no such limit: the threads above it wait for each other, for far longer than they compute.
"""

import os
from pathlib import Path

import torch

GROUPS = Path("/proc/self/cgroup")
MOUNT = Path("/sys/fs/cgroup")


def set_threads(chosen: int | None) -> None:
    """Sets torch's threads of this process: `chosen`, else OMP_NUM_THREADS, else what it may use and no more."""
    if chosen is not None:
        torch.set_num_threads(chosen)
    elif "OMP_NUM_THREADS" not in os.environ:
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        torch.set_num_threads(min(torch.get_num_threads(), max(1, usable_cores() // beside)))


def usable_cores() -> int:
    """The cores that this process may use: by its affinity, and by the quotas of its control groups, rounded up."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, *(-(-quota // period) for quota, period in _quotas(GROUPS, MOUNT)), affinity))


def _quotas(groups: Path, mount: Path) -> list[tuple[int, int]]:
    """(microseconds of processors, period) of each control group of this process that has a limit, parents too."""
    try:
        lines = groups.read_text().splitlines()
    except OSError:  # not Linux
        return []
    found = []
    for number, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if number == "0" and not controllers:  # version 2
            base, read = mount, _quota_of_version_2
        elif "cpu" in controllers.split(","):
            base, read = mount / controllers, _quota_of_version_1
        else:
            continue
        folder = base / path.lstrip("/")
        # a container often sees its own group as the root
        for place in {base, *(one for one in (folder, *folder.parents) if one.is_relative_to(base))}:
            if (quota := read(place)) is not None:
                found.append(quota)
    return found


def _quota_of_version_2(folder: Path) -> tuple[int, int] | None:
    return _pair(_words(folder / "cpu.max"))


def _quota_of_version_1(folder: Path) -> tuple[int, int] | None:
    return _pair([*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")])


def _pair(words: list[str]) -> tuple[int, int] | None:
    """(quota, period); None where there is no limit, which is `max` or -1."""
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return None
    return int(words[0]), int(words[1])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []

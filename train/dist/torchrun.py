"""What torchrun says to the processes that it starts."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist


def world() -> tuple[int, int]:
    """(number of this process, how many there are), as torchrun says."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def by_torchrun() -> bool:
    """Whether torchrun has started this process. It repeats one command whatever became of the run, on any machine."""
    return dist.is_torchelastic_launched()


def started_anew() -> bool:
    """Whether torchrun has started the processes before (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def start() -> str:
    """What all the starts by one torchrun have in common, and those by another have not: its name may be `none`."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {socket.gethostname()} {os.getppid()}"

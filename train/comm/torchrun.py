"""Environment variables of torchrun and of own starts: rank, world size, restarts and launch id of this process."""

import os
import socket

import torch.distributed as dist

STORE = "FNMODELS_STORE"  # names the file through which processes that the main job started find each other


def rank_and_world_size() -> tuple[int, int]:
    """(rank, world size) of this process; (0, 1) outside of torchrun."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def is_started() -> bool:
    """Whether this process is one of several already: of torchrun, of the main job, or of a process group."""
    return "WORLD_SIZE" in os.environ or dist.is_initialized()


def is_own_start() -> bool:
    """Whether the main job started this process (`train.job.processes.spawn`)."""
    return STORE in os.environ


def is_torchrun() -> bool:
    """Whether torchrun started this process, and may start the same command again after a failure."""
    return dist.is_torchelastic_launched()


def is_restart() -> bool:
    """Whether torchrun restarted the processes after a failure (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def launch_id() -> str:
    """An id shared by all restarts under one torchrun; torchrun's own run id may be `none`."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {socket.gethostname()} {os.getppid()}"

"""Runs a function in several processes of a gloo group: `together(4, function, ...)` returns their results."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def together(world: int, function: Callable[..., Any], *args: Any, threads: int = 1) -> list[Any]:
    """Runs function(*args), a module-level function, in `world` new processes; returns their JSON results in order.

    An error in one of them is raised here, and ends the others. threads: the number of threads of each. BENCHMARK_START
    in the environment is their start method; tests set fork, which saves the imports.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as place:
        arguments, method = (world, threads, place, function, args), os.environ.get("BENCHMARK_START", "spawn")
        torch.multiprocessing.start_processes(_member, arguments, nprocs=world, start_method=method)
        return [json.loads((Path(place) / f"{rank}.json").read_text()) for rank in range(world)]


def _member(
    rank: int, world: int, threads: int, place: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", f"file://{place}/store", rank=rank, world_size=world)
    try:
        (Path(place) / f"{rank}.json").write_text(json.dumps(function(*args)))
        dist.barrier()
    finally:
        dist.destroy_process_group()

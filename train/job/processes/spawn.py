"""Starts the processes of `--mesh` on this machine, as torchrun would, and passes requests to stop on to the first one.

A terminal sends Ctrl-C to all processes at once, a service manager SIGTERM. The started processes block both: the
process that started them answers, with STOP to the first one, which stops as a run by one process does.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from fnmodels.errors import UserError
from train.command_line import main_job
from train.dist.torchrun import OWN_STARTS, rank_and_world_size

from .launch import PEER_LOST
from .signals import STOP, counted_requests

BLOCKED = {signal.SIGINT, signal.SIGTERM, STOP}
GRACE = 10.0  # seconds that a second request leaves the processes; one that waits for another hears no signal

Main = Callable[[Sequence[str]], int]


def start(main: Main, argv: Sequence[str], processes: int) -> int:
    """Runs main(argv) in each of the processes; returns the exit code of all.

    main: picklable. UserError names a process that was killed.
    """
    others = set(multiprocessing.active_children())
    with counted_requests() as requests, _without_logs(), ThreadPoolExecutor(1) as launcher:
        # The thread blocks the signals, which a new process inherits; this one hears them.
        done = launcher.submit(_launch, main, list(argv), processes)
        _pass_on(requests, done, lambda: set(multiprocessing.active_children()) - others, processes)
    try:
        codes = done.result()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return 130 if failure.exitcode == 130 else 2  # it has printed why
        if requests():
            raise KeyboardInterrupt from error
        name = signal.Signals(-failure.exitcode).name
        raise UserError(f"process {rank} of the run was ended by {name}, and so all have ended") from error
    if PEER_LOST in codes.values():
        raise UserError("the processes of the run have lost their connections, and so all have ended")
    return 0


def _pass_on(requests: Callable[[], int], done: Future[Any], children: Callable[[], set[Any]], processes: int) -> None:
    """Waits for the processes; sends them a STOP for each request, and kills them where the second does not help."""
    passed, deadline, started = 0, float("inf"), False
    while not done.done():
        wait([done], timeout=0.1)
        alive = children()
        started = started or len(alive) == processes
        if started and passed < requests():
            passed += 1
            for child in alive:
                os.kill(child.pid, STOP)
            if passed == 2:
                deadline = time.monotonic() + GRACE
        if time.monotonic() > deadline:
            for child in alive:
                child.kill()


def _launch(main: Main, argv: list[str], processes: int) -> dict[int, int]:
    resource_tracker.ensure_running()  # first, since its start unblocks signals
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=f"{OWN_STARTS}{uuid.uuid4().hex}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    codes: dict[int, int] = elastic_launch(config, _process)(main, argv)
    return codes


def _process(main: Main, argv: list[str]) -> int:
    """Runs one process. It returns 0 or PEER_LOST; any other code ends it, and the launcher then ends the others."""
    rank, processes = rank_and_world_size()
    ended = threading.Event()
    threading.Thread(target=_end_with_parent, args=(rank == 0, ended), daemon=True).start()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    try:
        if rank == 0:
            signal.signal(STOP, signal.default_int_handler)
        # The launcher ends the others by SIGTERM; they ignore it where the first one can end them, see `follow`.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM if rank else STOP})
        code = main(argv)
    except KeyboardInterrupt:
        print(f"{main_job()}: stopped", file=sys.stderr)
        code = 130
    except Exception:
        traceback.print_exc()
        code = 1
    ended.set()
    if code not in (0, PEER_LOST):
        sys.exit(code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # by which the launcher ends those that have returned
    return code


def _end_with_parent(first: bool, ended: threading.Event) -> None:
    """A run whose starting process was killed is asked to stop, and none of its processes outlives it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    if first:
        os.kill(os.getpid(), STOP)
    ended.wait()
    os._exit(1)


@contextmanager
def _without_logs() -> Iterator[None]:
    """Hides the launcher's log, which reports each end of a process at length."""
    loggers = [logging.getLogger(name) for name in ("torch.distributed.elastic", "torch.multiprocessing")]
    before, handler = [logger.propagate for logger in loggers], logging.NullHandler()
    for logger in loggers:
        logger.propagate = False
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger, propagate in zip(loggers, before, strict=True):
            logger.propagate = propagate
            logger.removeHandler(handler)

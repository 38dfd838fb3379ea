"""Starts the processes of --mesh on this machine with torch's elastic launcher, and forwards stop requests to rank 0.

A terminal sends Ctrl-C to all processes at once, a service manager SIGTERM. The started processes block both; the
starting process handles them and sends STOP, upon which rank 0 stops as a run in one process does.
"""

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
GRACE = 10.0  # seconds until a second request kills the processes, as one blocked in a collective handles no signal

Main = Callable[[Sequence[str]], int]


def start(main: Main, argv: Sequence[str], processes: int) -> int:
    """Runs main(argv), which must be picklable, in `processes` processes; returns the exit code of the run.

    UserError where a process was killed by a signal, or all lost their connections.
    """
    others = set(multiprocessing.active_children())
    with counted_requests() as requests, _without_logs(), ThreadPoolExecutor(1) as launcher:
        # The thread blocks the signals, which new processes inherit; the main thread receives them.
        done = launcher.submit(_launch, main, list(argv), processes)
        _pass_on(requests, done, lambda: set(multiprocessing.active_children()) - others, processes)
    try:
        codes = done.result()
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:
            return 130 if failure.exitcode == 130 else 2  # the process has printed the reason
        if requests():
            raise KeyboardInterrupt from error
        name = signal.Signals(-failure.exitcode).name
        raise UserError(f"process {rank} of the run was ended by {name}, and so all have ended") from error
    if PEER_LOST in codes.values():
        raise UserError("the processes of the run have lost their connections, and so all have ended")
    return 0


def _pass_on(requests: Callable[[], int], done: Future[Any], children: Callable[[], set[Any]], processes: int) -> None:
    """Waits for the processes; sends a STOP per request, and kills them GRACE seconds after the second."""
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
    resource_tracker.ensure_running()  # before blocking signals, as its start unblocks them
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
        # The launcher ends other ranks with SIGTERM; they ignore it while rank 0 can end them, see `follow`.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM if rank else STOP})
        code = main(argv)
    except KeyboardInterrupt:
        print(f"{main_job()}: stopped", file=sys.stderr)
        code = 130
    except Exception:  # a bug: its traceback is printed here, and the exit code tells the launcher
        traceback.print_exc()
        code = 1
    ended.set()
    if code not in (0, PEER_LOST):
        sys.exit(code)
    # The launcher ends processes that have returned with SIGTERM.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return code


def _end_with_parent(is_rank_0: bool, ended: threading.Event) -> None:
    """Stops the run and ends this process when the process that started it is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    if is_rank_0:
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

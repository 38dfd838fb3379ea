"""Starts the processes of --mesh on this machine, and forwards stop requests to rank 0.

Nothing of it can be reached over a network: the processes meet through a file in a folder that only this user may
open, and talk over the loopback interface.

A terminal sends Ctrl-C to all processes at once, a service manager SIGTERM. The started processes block both; the
starting process handles them and sends STOP, upon which rank 0 stops as a run in one process does.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from fnmodels.errors import UserError
from train.comm.torchrun import STORE, rank_and_world_size
from train.command_line import BAD_STEPS, DIVERGED, main_job

from .launch import PEER_LOST
from .signals import STOP, counted_requests

BLOCKED = {signal.SIGINT, signal.SIGTERM, STOP}
GRACE = 10.0  # seconds until a second request kills the processes, as one blocked in a collective handles no signal
PATIENCE = 30.0  # seconds that the other processes have to end by themselves when one has failed
CONTEXT = multiprocessing.get_context("spawn")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

Main = Callable[[Sequence[str]], int]


def start(main: Main, argv: Sequence[str], processes: int) -> int:
    """Runs main(argv), which must be picklable, in `processes` processes; returns the exit code of the run.

    UserError where a process was killed by a signal, or all lost their connections.
    """
    with counted_requests() as requests, tempfile.TemporaryDirectory(prefix="fnmodels-") as folder:  # of mode 0700
        started = _start_processes(main, argv, processes, Path(folder) / "store")
        try:
            failed = _wait(started, requests)
        finally:
            _end(started)
    if failed is None:
        if any(process.exitcode == PEER_LOST for process in started):
            raise UserError("the processes of the run have lost their connections, and so all have ended")
        return 0
    code = started[failed].exitcode
    assert code is not None
    if code >= 0:
        return code if code in (130, DIVERGED, BAD_STEPS) else 2  # the process has printed the reason
    if requests():
        raise KeyboardInterrupt
    name = signal.Signals(-code).name
    raise UserError(f"process {failed} of the run was ended by {name}, and so all have ended")


def _start_processes(main: Main, argv: Sequence[str], processes: int, store: Path) -> list[BaseProcess]:
    shared = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    shared |= {STORE: str(store), "GLOO_SOCKET_IFNAME": LOOPBACK}
    # `python -c`, by which they begin, would look for modules in the working folder first, perhaps a stranger's.
    safe_path, os.environ["PYTHONSAFEPATH"] = os.environ.get("PYTHONSAFEPATH", ""), "1"
    resource_tracker.ensure_running()  # before blocking signals, as its start unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)  # inherited by the processes
    started: list[BaseProcess] = []
    try:
        for rank in range(processes):
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | shared
            started.append(CONTEXT.Process(target=_process, args=(main, list(argv), environment)))
            started[-1].start()
    except BaseException:
        _end(started)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.environ["PYTHONSAFEPATH"] = safe_path  # empty is unset
    return started


def _wait(started: Sequence[BaseProcess], requests: Callable[[], int]) -> int | None:
    """The rank of the first process that failed, or None after all have ended. Sends a STOP per request.

    GRACE seconds after the second request it kills the processes. One that has lost its peers has not failed: which of
    them did is seen here.
    """
    passed, deadline = 0, float("inf")
    while True:
        alive = [process for process in started if process.exitcode is None]
        failed = {rank: one.exitcode for rank, one in enumerate(started) if one.exitcode not in (None, 0, PEER_LOST)}
        if failed:
            return min(failed, key=lambda rank: (failed[rank] or 0, rank))  # a signal before what it led to
        if not alive:
            return None
        if passed < requests():
            passed += 1
            for process in alive:
                _send(process, STOP)
            if passed == 2:
                deadline = time.monotonic() + GRACE
        if time.monotonic() > deadline:
            for process in alive:
                process.kill()
        connection.wait([process.sentinel for process in alive], timeout=0.1)


def _end(started: Sequence[BaseProcess]) -> None:
    """Ends the processes that are left: with SIGTERM, and PATIENCE seconds later with SIGKILL."""
    deadline = time.monotonic() + PATIENCE
    for process in started:
        if process.pid is not None:
            process.terminate()
    for process in started:
        if process.pid is not None:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.exitcode is None:
                process.kill()
                process.join()


def _send(process: BaseProcess, number: signal.Signals) -> None:
    if process.exitcode is None and process.pid is not None:  # a process that was waited for may have lent its id
        os.kill(process.pid, number)


def _process(main: Main, argv: list[str], environment: Mapping[str, str]) -> None:
    """Runs one process, which ends with the code that main(argv) returns."""
    os.environ.update(environment)
    rank = rank_and_world_size()[0]
    ended = threading.Event()
    threading.Thread(target=_end_with_parent, args=(rank == 0, ended), daemon=True).start()
    try:
        if rank == 0:
            signal.signal(STOP, signal.default_int_handler)
        # The starting process ends other ranks with SIGTERM; they ignore it while rank 0 can end them, see `follow`.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM if rank else STOP})
        code = main(argv)
    except KeyboardInterrupt:
        print(f"{main_job()}: stopped", file=sys.stderr)
        code = 130
    except Exception:  # a bug: its traceback is printed here, and the exit code tells the starting process
        traceback.print_exc()
        code = 1
    ended.set()
    sys.exit(code)


def _end_with_parent(is_rank_0: bool, ended: threading.Event) -> None:
    """Stops the run and ends this process when the process that started it is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    if is_rank_0:
        os.kill(os.getpid(), STOP)
    ended.wait()
    os._exit(1)

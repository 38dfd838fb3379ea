"""Single-controller training: rank 0 runs the job and broadcasts commands, which all ranks execute together.

A run of one process is a rank 0 without others: the same commands, without messages.

Rank 0 alone reads text, prints, and writes the run folder. Collective work (a step, a loss, a save) is a method of
`Worker`: rank 0 broadcasts its name and arguments, then all ranks call it. The other ranks need no text, only
checkpoints, of which each reads its shards, and cannot diverge from rank 0. User errors are found by rank 0 before the
others start to work; any other failure of one process ends all.
"""

import datetime
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist

from fnmodels.errors import UserError
from train.comm.failures import peer_failure
from train.comm.torchrun import rank_and_world_size
from train.command_line import main_job, sentence
from train.state import State

from .launch import PEER_LOST, starter_reports, with_long_timeout
from .signals import handled
from .worker import Worker, WorkerConfig

Message = tuple[str, tuple[Any, ...]]


class Controller:
    """Rank 0's handle on all ranks, of which it may be the only one: runs methods of `Worker` on each of them."""

    def __init__(self, config: WorkerConfig, *, fresh: bool) -> None:
        self.several = config.mesh_setup.mesh.world > 1
        with self._sent("setup", (config,)):
            self._worker = Worker(config)
        self.do("initialize", fresh)

    @property
    def state(self) -> State:
        """This rank's State after the last command."""
        return self._worker.state

    def do(self, command: str, *args: Any) -> Any:
        """Calls `Worker.<command>` on all ranks. CommandFailed where it raises: others may hang or fail in it too."""
        with self._sent(command, args):
            return getattr(self._worker, command)(*args)

    @contextmanager
    def _sent(self, command: str, args: tuple[Any, ...]) -> Iterator[None]:
        if not self.several:
            yield
            return
        try:
            _send((command, args))
            yield
        except BaseException as error:
            raise CommandFailed(error) from error


class CommandFailed(BaseException):
    """Carries what a collective command raised on rank 0. A BaseException, so that only `lead` handles it."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def lead(run: Callable[[], int]) -> int:
    """Runs `run` on rank 0 and returns its exit code, which ends the others too. UserError where one of them ended.

    Between two commands the others receive the end as a message; within one they notice that this process ends.
    """
    try:
        code = run()
    except CommandFailed as failed:
        error = failed.error
    except BaseException:
        _end(2)  # what a UserError becomes
        raise
    else:
        _end(code)
        return code
    if lost := peer_failure(error):
        if starter_reports(lost):
            return PEER_LOST
        raise UserError(f"another process of the run has ended or hangs, and so this one ends: {lost}") from error
    raise error


def _end(code: int) -> None:
    with suppress(RuntimeError):  # the others have ended
        _send(("end", (code,)))


def follow(limit: datetime.timedelta | None) -> int:
    """The loop of all ranks but 0: executes commands; returns rank 0's exit code. limit: of `process_group`."""
    worker: Worker | None = None
    with handled(signal.SIG_IGN, (signal.SIGINT, signal.SIGTERM)):  # rank 0 handles requests to stop
        try:
            while True:
                with with_long_timeout(limit):
                    command, args = _receive()
                if command == "end":
                    code: int = args[0]
                    return code
                if command == "setup":
                    worker = Worker(*args)
                else:
                    getattr(worker, command)(*args)
        except Exception as error:  # any failure ends this process, and so the run
            lost = peer_failure(error)
            if lost and starter_reports(lost):
                return PEER_LOST
            failure = str(error) or repr(error)
            what = f"ends, for another has ended or hangs: {lost}" if lost else f"has failed: {failure}"
            said = sentence(f"process {rank_and_world_size()[0]} of the run {what}")
            print(f"{main_job()}: {said}", file=sys.__stderr__, flush=True)
            return 1


def _send(message: Message) -> None:
    dist.broadcast_object_list([message], src=0)


def _receive() -> Message:
    box: list[Any] = [None]
    dist.broadcast_object_list(box, src=0)
    message: Message = box[0]
    return message

"""Several processes for one run: the first leads, the others do what it does.

    torchrun --nproc-per-node 4 -m train -- --run runs/four --mesh pp=2,fsdp=2   # without -- it takes --run for its own

The first process alone reads text, prints, and keeps the run folder. What all must do together (a step, a loss, a save)
are methods of `Member`, and before it calls one the first tells the others which, and with what: so that they need no
text and no folder but those of checkpoints, of which each reads its part, and are never at another place of the program
than it. A mistake of the user is found by the first before the others have begun; whatever else ends one process ends
all.
"""

from __future__ import annotations

import datetime
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fnmodels.errors import UserError
from fnmodels.tree import Tree
from train.command_line import main_job, sentence
from train.data.rows import Batch
from train.dist.torchrun import world
from train.state import State

from .launch import patiently
from .worker import Member, Work

Message = tuple[str, tuple[Any, ...]]


class Team:
    """The first process' view: what a Member can, done by all."""

    def __init__(self, work: Work, *, fresh: bool) -> None:
        with _acting():
            _send(("work", (work,)))
            self._member = Member(work)
        self.state: State = self.do("begin", fresh)

    def do(self, act: str, *args: Any) -> Any:
        """As the Member's. ActFailed where it raises: the others may be in the middle of the act, or fail as well."""
        with _acting():
            _send((act, args))
            return getattr(self._member, act)(*args)

    def loss(self, _: Tree, batch: Batch, *, layout: Any = None) -> tuple[Tensor, Tensor]:
        """As a Job's: of the parameters that the processes hold."""
        found: tuple[Tensor, Tensor] = self.do("loss", batch)
        return found

    def step(self, _: State, batch: Batch) -> tuple[State, dict[str, Any]]:
        found: tuple[State, dict[str, Any]] = self.do("step", batch)
        return found


class ActFailed(BaseException):
    """What an act of all has raised in the first process. No Exception: nothing between here and `lead` goes on."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


@contextmanager
def _acting() -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        raise ActFailed(error) from error


def lead(run: Callable[[], int]) -> int:
    """`run` in the first process, and its exit code in all. UserError where another process has ended.

    The others are told of an end where they listen, between two acts. Within one they see that this process goes.
    """
    try:
        code = run()
    except ActFailed as failed:
        error = failed.error
    except BaseException:
        _end(2)  # what a UserError becomes
        raise
    else:
        _end(code)
        return code
    if lost := loss_of_another(error):
        raise UserError(f"another process of the run has ended or hangs, and so this one ends: {lost}") from error
    raise error


def _end(code: int) -> None:
    with suppress(RuntimeError):  # they are gone
        _send(("end", (code,)))


def loss_of_another(error: BaseException | None) -> str | None:
    """What it, or what it came of, says of the connection with another process; None where that is not its matter."""
    words = ("gloo", "pair closure", "timed out")
    while error is not None:
        said = str(error)
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(word in said.lower() for word in words)
        ):
            return said.partition(". This is typically")[0]  # gloo's guesses
        error = error.__cause__ or error.__context__
    return None


def follow(limit: datetime.timedelta | None) -> int:
    """What all processes but the first do. Returns the exit code that the first one tells. limit: see `joined`."""
    member: Member | None = None
    # it is the first that is asked to stop
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while True:
            with patiently(limit):
                act, args = _receive()
            if act == "end":
                code: int = args[0]
                return code
            if act == "work":
                member = Member(*args)
            else:
                getattr(member, act)(*args)
    except Exception as error:  # whatever it is ends this process, with a sentence, and so the run
        lost = loss_of_another(error)
        what = f"ends, for another has ended or hangs: {lost}" if lost else f"has failed: {str(error) or repr(error)}"
        said = sentence(f"process {world()[0]} of the run {what}")
        print(f"{main_job()}: {said}", file=sys.__stderr__, flush=True)
        return 1
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(message: Message) -> None:
    dist.broadcast_object_list([message], src=0)


def _receive() -> Message:
    box: list[Any] = [None]
    dist.broadcast_object_list(box, src=0)
    message: Message = box[0]
    return message

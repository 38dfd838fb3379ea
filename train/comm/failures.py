"""Names the process that raised or ended when a collective of this one fails, in place of a message of gloo or NCCL.

Each process that raises leaves a note in the store of the process group. One whose connection breaks answers a roll
call there: processes without a note or an answer have ended.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from fnmodels.ops.torch_internals import default_store

PATIENCE = 3.0  # seconds that other processes have to notice the failure too


def peer_failure(error: BaseException | None) -> str | None:
    """The message of a lost connection to another rank in the exception chain of `error`; None where there is none."""
    words = ("gloo", "pair closure", "timed out")
    while error is not None:
        message = str(error)
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(word in message.lower() for word in words)
        ):
            return message.partition(". This is typically")[0]  # without gloo's guesses
        error = error.__cause__ or error.__context__
    return None


@contextlib.contextmanager
def naming_the_lost(ranks: Callable[[], Sequence[int]], during: Callable[[], str]) -> Iterator[None]:
    """Runs its body; RuntimeError, from the library's error, if it fails because another process raised or ended.

    ranks: of the processes that run it together, all of them alike. during: what they do, such as "step 3". Both are
    called after a failure only.
    """
    number = next(_calls)  # the same in all of them
    try:
        yield
    except Exception as error:
        rank, store = dist.get_rank(), default_store()
        if peer_failure(error) is None:
            with contextlib.suppress(RuntimeError):  # the process that holds the store has ended
                if store is not None:
                    store.set(_key(number, rank), f"raised {type(error).__name__}: {error}")
            raise
        others = {other: _key(number, other) for other in ranks() if other != rank}
        lost = [] if store is None else _roll_call(store, _key(number, rank), others)
        who = "; ".join(lost) or "another process raised or ended"
        what = f"Process {rank} lost its connection in {during()}: {who}."
        raise RuntimeError(f"{what} Make the process group anew, and load the last saved state.") from error


_calls = itertools.count()


def _key(number: int, rank: int) -> str:
    return f"fnmodels/failure/{number}/{rank}"


def _roll_call(store: Any, own: str, others: Mapping[int, str]) -> list[str]:
    """["process 1 raised ...", "process 2 has ended"] of the processes that raised or do not answer."""
    try:
        store.set(own, "")
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and not all(store.check([key]) for key in others.values()):
            time.sleep(0.05)
        notes = {rank: store.get(key).decode() if store.check([key]) else None for rank, key in others.items()}
    except RuntimeError:
        return ["the process that holds the group's store has ended"]
    return [f"process {rank} {note or 'has ended'}" for rank, note in notes.items() if note != ""]

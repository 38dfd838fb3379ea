"""Process group of a run: rendezvous of the processes, also after a restart, and their timeouts."""

import datetime
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fnmodels.errors import UserError
from train.comm.torchrun import STORE, is_own_start, rank_and_world_size
from train.command_line import main_job, sentence
from train.parallel.mesh import warn_of_group

JOIN_TIMEOUT = datetime.timedelta(seconds=60)  # for the rendezvous of all processes
LONG_TIMEOUT = datetime.timedelta(hours=2)  # for what rank 0 does alone, such as reading text
PEER_LOST = 3  # exit code of a process that lost the connection to another, whose end `spawn` reports


def starter_reports(loss: str) -> bool:
    """Whether the process that started this one reports the loss of a peer: it sees which one ended, but no hang."""
    return is_own_start() and "timed out" not in loss.lower() and "timeout" not in loss.lower()


@contextmanager
def process_group(limit: datetime.timedelta) -> Iterator[datetime.timedelta | None]:
    """Creates a gloo process group of all processes, unless the caller has initialized one.

    limit: the timeout for a process that hangs; one that ends is noticed at once. Yields it, or None where the group is
    the caller's and keeps its own timeouts. UserError where a process does not join.
    """
    if dist.is_initialized():
        warn_of_group()
        yield None
        return
    rank, processes = rank_and_world_size()
    try:
        # The rendezvous has a shorter timeout than later collectives.
        store = _rendezvous(rank, processes)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=limit)
    except (RuntimeError, ValueError) as error:
        reason = f"process {rank} of {processes} could not join the others: {error}"
        if rank:  # rank 0 may not be running to report it
            print(f"{main_job()}: {sentence(reason)}", file=sys.__stderr__, flush=True)
        raise UserError(reason) from error
    try:
        yield limit
    finally:
        dist.destroy_process_group()


@contextmanager
def with_long_timeout(limit: datetime.timedelta | None) -> Iterator[None]:
    """Raises the timeout for a message that rank 0 sends after work it does alone. limit: of `process_group`."""
    if limit is None:
        yield
        return
    set_timeout(max(limit, LONG_TIMEOUT), dist.group.WORLD)
    yield
    set_timeout(limit, dist.group.WORLD)


def set_timeout(limit: datetime.timedelta, *groups: dist.ProcessGroup | None) -> None:
    """Sets the timeout of this process in these groups; those of a new mesh have torch's default of 30 minutes."""
    for group in groups:
        if group is not None:
            group.set_timeout(limit)


def _rendezvous(rank: int, processes: int) -> Store:
    """The key-value store of all processes, after all have joined. ValueError or RuntimeError where one does not."""
    # An own start meets in a file of this user's: torch's other stores listen on every interface, without a secret.
    place = f"file://{os.environ[STORE]}" if is_own_start() else "env://"
    found, *_ = next(rendezvous(place, rank, processes, timeout=JOIN_TIMEOUT))
    return PrefixStore(f"start {_agreed_start(found, rank, processes)}", found)


def _agreed_start(store: Store, rank: int, processes: int) -> str:
    """A name that the processes of this start share, and those of no other; returns once all have come.

    torchrun may keep the store over restarts, with the addresses of processes that have ended; and an agent that takes
    the place of a lost one counts restarts from 0. So neither tells starts apart: rank 0 names this one, and answers
    each other process by a key that only that process knows. ValueError or RuntimeError where one does not come.
    """
    own = uuid4().hex
    if rank == 0:
        _welcome(store, own, set(range(1, processes)))
        return own
    store.set(f"hello {rank}", own)
    try:
        store.wait([f"welcome {own}"], JOIN_TIMEOUT)
    except RuntimeError as error:  # a DistError, but for a file
        raise _missing({0}) from error
    start = store.get(f"welcome {own}").decode()
    store.set(f"here {start} {rank}", "")
    try:
        store.wait([f"go {start}"], JOIN_TIMEOUT)
    except RuntimeError as error:
        others = {other for other in range(1, processes) if not store.check([f"here {start} {other}"])}
        raise _missing(others) from error
    return start


def _welcome(store: Store, start: str, missing: set[int]) -> None:
    """Rank 0's part: tells each process the name of the start, until all know it."""
    ends = time.monotonic() + JOIN_TIMEOUT.total_seconds()
    while missing and time.monotonic() < ends:
        for other in tuple(missing):
            if store.check([f"here {start} {other}"]):
                missing.discard(other)
            elif store.check([f"hello {other}"]):  # perhaps of a process that has ended, which no longer reads it
                store.set(f"welcome {store.get(f'hello {other}').decode()}", start)
        time.sleep(0.01)
    if missing:
        raise _missing(missing)
    store.set(f"go {start}", "")


def _missing(ranks: set[int]) -> ValueError:
    names = ", ".join(map(str, sorted(ranks)))
    return ValueError(f"of them {names} did not come in {JOIN_TIMEOUT.total_seconds():g} seconds")

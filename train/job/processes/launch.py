"""How the processes that torchrun has started find each other: once, and anew after one of them has ended."""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from fnmodels.errors import UserError
from train.command_line import main_job, sentence
from train.dist.torchrun import world
from train.parallel.mesh import warn_of_group

JOINING = datetime.timedelta(seconds=60)  # for all to find each other
PATIENCE = datetime.timedelta(hours=2)  # for what the first one does alone, as reading text


@contextmanager
def joined(limit: datetime.timedelta) -> Iterator[datetime.timedelta | None]:
    """In a process group of all that torchrun has started; in that which there is where somebody has made one.

    limit: how long they wait for one that hangs; where it ends, that is noticed at once. Yields it, or None where the
    group is somebody else's, whose limits rule.
    """
    if dist.is_initialized():
        warn_of_group()
        yield None
        return
    rank, processes = world()
    try:
        # Its key-value store lets all wait for each other for a shorter time than they do afterwards.
        store = _met(rank, processes)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=limit)
    except (RuntimeError, ValueError) as error:
        reason = f"process {rank} of {processes} could not join the others: {error}"
        if rank:  # the first may not be there to say it
            print(f"{main_job()}: {sentence(reason)}", file=sys.__stderr__, flush=True)
        raise UserError(reason) from error
    try:
        yield limit
    finally:
        dist.destroy_process_group()


@contextmanager
def patiently(limit: datetime.timedelta | None) -> Iterator[None]:
    """For a message that comes when the first process has done what it does alone. limit: as `joined` yields it."""
    if limit is None:
        yield
        return
    set_limit(max(limit, PATIENCE), dist.group.WORLD)
    yield
    set_limit(limit, dist.group.WORLD)


def set_limit(limit: datetime.timedelta, *groups: dist.ProcessGroup | None) -> None:
    """How long this process waits in these groups from now on: meshes are made with torch's half an hour."""
    for group in groups:
        if group is not None:
            group.set_timeout(limit)


def _met(rank: int, processes: int) -> Store:
    """The store of all processes, once all are there. ValueError, RuntimeError (DistError) where they do not come."""
    found, *_ = next(rendezvous("env://", rank, processes, timeout=JOINING))
    # torchrun keeps the store when it starts the processes anew, and with it the addresses of those that are gone.
    store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", found)
    keys = {f"here {other}": other for other in range(processes)}
    store.set(f"here {rank}", "")
    try:
        store.wait(list(keys), JOINING)
    except dist.DistError as error:
        missing = ", ".join(str(other) for key, other in keys.items() if not store.check([key]))
        raise ValueError(f"of them {missing} did not come in {JOINING.total_seconds():g} seconds") from error
    return store

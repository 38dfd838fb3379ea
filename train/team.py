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
import functools
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.tree import Tree
from train import model, sharded
from train.checkpoint import Checkpoint
from train.commands import sentence
from train.errors import UserError
from train.forward import make_eval_step
from train.job import balance_of, is_routed, optimizer_for, step_options
from train.loss import next_token_loss
from train.optim import with_paths
from train.parallel import Mesh, Strategy
from train.parallel.everywhere import fetching
from train.parallel.mesh import warn_of_group
from train.parallel.pipeline import SCHEDULES, check_microbatches, pipeline
from train.parallel.stages import init_stage, stage_plan
from train.parallel.step import rules_of
from train.rows import Batch
from train.settings import Settings
from train.state import State, init_state
from train.step import make_step

JOINING = datetime.timedelta(seconds=60)  # for all to find each other
PATIENCE = datetime.timedelta(hours=2)  # for the first one's text; a process that ends is noticed at once
Message = tuple[str, tuple[Any, ...]]


def world() -> tuple[int, int]:
    """(number of this process, how many there are), as torchrun says."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def started_anew() -> bool:
    """Whether torchrun has started the processes before (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0


def start() -> str:
    """What all the starts by one torchrun have in common, and those by another have not: its name may be `none`."""
    return f"{os.environ.get('TORCHELASTIC_RUN_ID', '')} {socket.gethostname()} {os.getppid()}"


@contextmanager
def joined() -> Iterator[None]:
    """In a process group of all that torchrun has started; in that which there is where somebody has made one."""
    if dist.is_initialized():
        warn_of_group()
        yield
        return
    rank, processes = world()
    try:
        # Its key-value store lets all wait for each other for a shorter time than they do afterwards.
        store = _met(rank, processes)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        reason = f"process {rank} of {processes} could not join the others: {error}"
        if rank:  # the first may not be there to say it
            print(f"fnmodels-train: {sentence(reason)}", file=sys.__stderr__, flush=True)
        raise UserError(reason) from error
    try:
        yield
    finally:
        dist.destroy_process_group()


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


@dataclass(frozen=True)
class Sharing:
    """Who does what. schedule: of a pipeline; microbatches: in how many of them it takes the rows that a stage has."""

    mesh: Mesh
    schedule: str = "1F1B"
    microbatches: int = 1

    def __str__(self) -> str:
        return f"--mesh {self.mesh}"


@dataclass(frozen=True)
class Work:
    """What every process must know of the run."""

    sharing: Sharing
    settings: Settings
    config: Any


def checked(
    text: str | None, settings: Settings, schedule: str | None = None, microbatches: int | None = None
) -> Sharing:
    """What `--mesh`, `--schedule` and `--microbatches` say; without the last, each microbatch has one row.

    UserError where the processes that there are, or these settings, do not go with it.
    """
    processes = world()[1]
    if text is None and processes > 1:
        how = f"say how they share the work, as with --mesh fsdp={processes}"
        raise UserError(f"there are {processes} processes: {how}")
    place = f"--mesh {text}"
    try:
        mesh = Mesh.parse(text or "")
    except ValueError as error:
        raise UserError(f"{place}: {error}") from error
    if mesh.world != processes:
        raise UserError(
            f"{place} is of {mesh.world} processes, and there {'is' if processes == 1 else 'are'} {processes}: start "
            f"them with torchrun --nproc-per-node {mesh.world} -m train -- and the flags"
        )
    if settings.lora and processes > 1:
        raise UserError(f"{place}: adapters (--lora) are trained by one process: leave one of the two out")
    if settings.batch_rows % mesh.rows:
        raise UserError(f"{place} takes a batch's rows in {mesh.rows} parts, and --batch-rows is {settings.batch_rows}")
    several, inside = mesh.world > 1, mesh.world > mesh.dp * mesh.fsdp
    if several and (settings.compile == "whole" or (settings.compile == "block" and inside)):
        raise UserError(
            f"{place}: no message goes into a compiled graph, so that blocks alone are compiled, over dp and fsdp: "
            f"leave --compile {settings.compile} out"
        )
    if several and settings.compile == "block" and settings.remat == "selective":
        raise UserError(
            f"{place}: --remat selective chooses among single operations, which compiled blocks hide: take full"
        )
    if settings.batch_rows // mesh.rows < settings.accumulate:
        left = f"leaves each {settings.batch_rows // mesh.rows} of the {settings.batch_rows} rows of a batch"
        raise UserError(f"{place} {left}, which --accumulate {settings.accumulate} cannot take in so many parts")
    if mesh.pp == 1:
        for name, value in (("--schedule", schedule), ("--microbatches", microbatches)):
            if value is not None:
                raise UserError(
                    f"{name} {value} is for pipelines, and {place} has none: leave it out, or give --mesh pp=2"
                )
        return Sharing(mesh)
    if settings.accumulate > 1:
        raise UserError(f"{place}: the parts of a batch in pipelines are --microbatches: leave --accumulate out")
    if schedule is not None and schedule not in SCHEDULES:
        raise UserError(f"--schedule {schedule} is not one of {', '.join(SCHEDULES)}")
    rows = settings.batch_rows // mesh.rows
    if rows % (microbatches or rows):
        raise UserError(
            f"--microbatches {microbatches} does not divide the {rows} rows that a stage has of a batch (--batch-rows "
            f"{settings.batch_rows}, in {mesh.rows} parts)"
        )
    return Sharing(mesh, schedule or "1F1B", microbatches or rows)


def check_fit(sharing: Sharing, settings: Settings, config: Any) -> None:
    """UserError where the model does not divide so."""
    mesh = sharing.mesh
    length = min(settings.row_length, config.max_position_embeddings)
    if length % mesh.cp:
        raise UserError(f"--mesh {mesh} takes a row's tokens in {mesh.cp} parts, and a row has {length}")
    try:
        P.plan(fnmodels.family_of(config).spec(config), rules_of(mesh, config), mesh.sizes)
        if mesh.pp > 1:
            check_microbatches(pipeline(config, mesh.pp, sharing.schedule), sharing.microbatches)
    except ValueError as error:
        raise UserError(f"--mesh {mesh}: {error}") from error


class Member:
    """One process' part of the run. All call the same methods in the same order."""

    def __init__(self, work: Work) -> None:
        settings, self.config, self.mesh = work.settings, work.config, work.sharing.mesh
        family, devices = fnmodels.family_of(self.config), self.mesh.device_mesh()
        dtype = getattr(torch, str(settings.dtype))
        strategy = Strategy(
            gather_dtype=None if dtype is torch.float32 else dtype,
            schedule=work.sharing.schedule,
        )
        self.whole_plan = P.plan(family.spec(self.config), rules_of(self.mesh, self.config), devices)
        self.plan = self.whole_plan
        if self.mesh.pp > 1:
            self.plan = stage_plan(self.whole_plan, self.config, devices, strategy)
        loss = functools.partial(next_token_loss, config=self.config, aux=is_routed(self.config))
        self.optimizer = optimizer_for(family.spec(self.config), settings)
        train_loss = functools.partial(loss, balance=balance_of(settings))
        how = step_options(settings) | {"mesh": self.mesh, "strategy": strategy}
        if self.mesh.pp > 1:
            how["accumulate"] = work.sharing.microbatches
        self._step = make_step(train_loss, self.optimizer, **how)
        self._loss = make_eval_step(loss, mesh=self.mesh, strategy=strategy)
        self.settings = settings
        self.state: State

    def begin(self, fresh: bool) -> State:
        """A State at step 0; without values, for `load`, if it is not `fresh`. Each process makes what it holds."""
        if not fresh:
            kinds = tree.flatten(P.abstract(self.config, dtype=torch.float32))

            def empty(path: str, how: P.Sharding) -> Tensor:
                part = kinds[path][how.here()]
                return how.distribute(torch.empty(part.shape, dtype=part.dtype))

            params = with_paths(empty, self.plan)
        elif self.settings.init is not None:
            _, params = model.load_whole(Path(self.settings.init), plan=self.plan)
        else:
            params = init_stage(self.config, self.settings.seed, self.plan)
        self.state = init_state(params, self.optimizer)
        return self.state

    def load(self, found: Checkpoint) -> State:
        self.state = sharded.load(found, self.state)
        return self.state

    def step(self, batch: Batch) -> tuple[State, dict[str, Any]]:
        self.state, metrics = self._step(self.state, batch)
        return self.state, metrics

    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum, count) of a batch with any number of rows."""
        missing = -len(batch["tokens"]) % self.mesh.rows
        if missing:
            more = tree.map(lambda t: t[:1].expand(missing, *t.shape[1:]), batch)
            more = {**more, "labels": torch.full_like(more["labels"], -100)}
            batch = tree.map(lambda *pair: torch.cat(pair), dict(batch), more)
        found = self._loss(self.state.params, batch)
        return found["total"], found["count"]

    def save(self, folder: Path, step: int, progress: dict[str, Any], keep: int) -> None:
        sharded.save(folder, step, self.state, progress, keep=keep)

    def whole(self) -> Tree:
        """All parameters, in the first process; None in the others."""
        first, (_, fetch) = dist.get_rank() == 0, fetching(self.state.params)

        def one(path: str, _: Any) -> Tensor | None:
            full = fetch(path)
            return full.clone() if first else None  # never the part itself, into which the next step writes

        return with_paths(one, self.whole_plan)


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


def follow() -> int:
    """What all processes but the first do. Returns the exit code that the first one tells."""
    member: Member | None = None
    # it is the first that is asked to stop
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while True:
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
        print(f"fnmodels-train: {said}", file=sys.__stderr__, flush=True)
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

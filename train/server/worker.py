"""`Worker`: the thread that owns the models, where answers of many clients are drawn together."""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels.ops.invariant.attention import TILE
from fnmodels.options import Kernel, is_invariant
from fnmodels.tree import Tree
from train.generation.batching import BatchSettings, ContinuousBatch
from train.generation.checks import check_request, learned_positions
from train.generation.requests import Event, Request

from .errors import ApiError, stopped
from .metrics import Metrics
from .scores import PromptScores, ScoredPrompt, score_prompts

SCORED = 4096  # tokens of prompts that are scored between two steps
Deliver = Callable[[list[tuple["Ticket", Any]]], None]


@dataclass(eq=False)
class Ticket:
    """A request to the worker, and where what becomes of it is put.

    Args:
        put: Called in the thread of the server with each `Event`, `PromptScores`, result of a job, or exception.
        request: What is generated; None: nothing is.
        prompt: What is scored; None: nothing is.
        job: A function that runs between two steps, such as an update; None: there is none.
    """

    put: Callable[[Any], None]
    request: Request | None = None
    prompt: ScoredPrompt | None = None
    job: Callable[[], Any] | None = None
    error: Exception | None = None  # that the request's own `logits_fn` raised
    number: int = -1
    began: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, eq=False)
class Served:
    """A model that answers: the whole one where it reads images."""

    params: Tree
    config: Any
    tokenizer: Any


@dataclass
class _Line:
    """The requests to one model: those that wait, those whose prompts are scored, those under way, and their slots."""

    waiting: deque[Ticket] = field(default_factory=deque)
    scores: deque[Ticket] = field(default_factory=deque)
    running: dict[int, Ticket] = field(default_factory=dict)
    admitting: list[Ticket] = field(default_factory=list)  # those of `running` whose prompts are computed
    single: int = 0  # how many are taken one by one, because one of them fails
    batch: ContinuousBatch | None = None  # of the worker's thread alone
    idle: int = 0  # rows of steps without a request since the last copy of the slots, while no request waited

    def tickets(self) -> list[Ticket]:
        return [*self.waiting, *self.scores, *self.running.values()]


class Worker:
    """Runs one thread in which prompts are scored, answers drawn and jobs done, in turn.

    Args:
        slots: Answers of one model that are drawn at once.
        capacity: The most tokens of a request, prompt and answer.
        queue: Requests that may wait.
        deliver: Called in the worker's thread with what is ready; it must hand it to the server's thread.
        metrics: What is counted.
        kv_dtype: Of the cache, see `BatchSettings`.
        kernel: Of all passes, see `fnmodels.forward`.
        base: The model whose idle cache is kept; None: none is.
    """

    def __init__(
        self,
        *,
        slots: int,
        capacity: int,
        queue: int,
        deliver: Deliver,
        metrics: Metrics,
        kv_dtype: torch.dtype | None = None,
        kernel: Kernel = "auto",
        base: Served | None = None,
    ) -> None:
        self._base = base
        self.slots, self.capacity, self.queue, self.metrics = slots, capacity, queue, metrics
        self._deliver, self._kv_dtype, self._kernel = deliver, kv_dtype, kernel
        self._changed, self._draining, self._stopped = threading.Condition(), False, False
        self._lines: dict[Served, _Line] = {}
        self._jobs = deque[Ticket]()
        self._cancelled = set[Ticket]()
        self._count = 0
        self._thread = threading.Thread(target=self._run, name="fnmodels-server", daemon=True)
        self._thread.start()

    def check(self, model: Served, request: Request, row: int = 0) -> None:
        """ApiError for a request that the model cannot answer to its end."""
        try:
            check_request(
                row,
                request,
                model.config,
                tokenizer=model.tokenizer,
                capacity=self.capacity,
                learned=learned_positions(model.config),
            )
        except (ValueError, TypeError) as error:
            raise ApiError(400, str(error)) from error

    def check_room(self, count: int) -> None:
        """ApiError where so many more requests are above the limit, of those that wait or of any number."""
        if count > self.queue:
            raise ApiError(
                400, f"The request has {count:,} parts to answer; this server's queue has room for {self.queue:,}."
            )
        waiting = self._queued()
        if waiting + count > self.queue:
            raise ApiError(
                429,
                f"{waiting} requests wait already, and {count} more would be above the limit of {self.queue}: "
                "try again later.",
                retry_after=1 + waiting // max(1, self.slots),
            )

    def submit(self, model: Served | None, tickets: Sequence[Ticket], *, accepted: bool = False) -> None:
        """Queues all tickets or none. ApiError where too many wait, or the worker has stopped.

        model: that answers; None: of jobs. accepted: whether `check_room` was asked for them before.
        """
        with self._changed:
            if self._draining:
                raise stopped()
            if not accepted:
                self.check_room(len(tickets))
            for ticket in tickets:
                self._count += 1
                ticket.number = self._count
                if ticket.job is not None:
                    self._jobs.append(ticket)
                    continue
                assert model is not None
                line = self._lines.setdefault(model, _Line())
                (line.scores if ticket.request is None else line.waiting).append(ticket)
            self._measure()
            self._changed.notify()

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """Ends tickets: those that wait are left out, those that run stop before the next step."""
        with self._changed:
            gone = set(tickets)
            for line in self._lines.values():
                line.waiting = deque(ticket for ticket in line.waiting if ticket not in gone)
                line.scores = deque(ticket for ticket in line.scores if ticket not in gone)
                self._cancelled |= gone & set(line.running.values())
            self._measure()
            self._changed.notify()

    def drain(self) -> None:
        """Takes no more requests; those that wait get an error at once, and those that run go on."""
        with self._changed:
            self._draining = True
            self._refuse()

    def _refuse(self) -> None:
        """Ends what waits with an error."""
        with self._changed:
            waiting = [*self._jobs, *(one for line in self._lines.values() for one in (*line.waiting, *line.scores))]
            self._jobs.clear()
            for line in self._lines.values():
                line.waiting.clear()
                line.scores.clear()
            self._measure()
        self._deliver([(ticket, stopped()) for ticket in waiting])

    def stop(self) -> None:
        """Ends the thread after the step it is in; what was not answered gets an error."""
        with self._changed:
            self._draining = self._stopped = True
            self._changed.notify()
        self._thread.join()

    def _queued(self) -> int:
        with self._changed:
            return len(self._jobs) + sum(len(line.waiting) + len(line.scores) for line in self._lines.values())

    def _measure(self) -> None:
        self.metrics.set("queue", self._queued())
        self.metrics.set("running", sum(len(line.running) for line in self._lines.values()))

    def _run(self) -> None:
        while self._turn():  # which holds no model while it waits
            pass
        self._refuse()
        self._deliver([(ticket, stopped()) for line in self._lines.values() for ticket in line.running.values()])

    def _turn(self) -> bool:
        """Waits for requests and does a job and a step of each model; False: the worker was stopped."""
        with self._changed:
            while not (self._stopped or self._jobs or any(line.tickets() for line in self._lines.values())):
                self._changed.wait()
            if self._stopped:
                return False
            if self._draining:  # requests that ran may wait again, where one of several failed
                self._refuse()
            job = self._jobs.popleft() if self._jobs else None
            cancelled, self._cancelled = self._cancelled, set()
            lines = list(self._lines.items())
            self._measure()
        if job is not None:
            self._done(job)
        for model, line in lines:
            self._forget(line, cancelled)
            self._score(model, line)
            self._advance(model, line)
        with self._changed:
            for model, line in lines:  # the memory of a cache that is idle, but for the base model's
                if model is not self._base and not line.tickets():
                    del self._lines[model]
        return True

    def _done(self, ticket: Ticket) -> None:
        assert ticket.job is not None
        try:
            result = ticket.job()
        except Exception as error:
            result = error
        self._deliver([(ticket, result)])

    def _forget(self, line: _Line, cancelled: set[Ticket]) -> None:
        gone = {number for number, ticket in line.running.items() if ticket in cancelled}
        if gone and line.batch is not None:
            line.batch.cancel(gone)
            with self._changed:
                line.running = {number: ticket for number, ticket in line.running.items() if number not in gone}
                self._measure()
            self.metrics.add("cancelled_total", len(gone))

    def _score(self, model: Served, line: _Line) -> None:
        taken, size = list[Ticket](), 0
        with self._changed:
            while line.scores and (not taken or size + _scored(line.scores[0]) <= SCORED):
                taken.append(line.scores.popleft())
                size += _scored(taken[-1])
        if not taken:
            return
        self._deliver(list(zip(taken, _scores(model, taken, self._kernel), strict=True)))
        self.metrics.add("scored_tokens_total", size)

    def _advance(self, model: Served, line: _Line) -> None:
        """Takes requests as slots become free, and draws a token for each that is under way."""
        if not (line.waiting or line.running):
            return
        try:
            batch = line.batch = line.batch or self._empty_batch(model)
            begin = time.monotonic()
            with torch.no_grad():
                self._admit(batch, line)
                events = self._draw(batch, line)
        except Exception as error:  # of the model: none of its requests can go on
            with self._changed:
                lost = [*line.running.values(), *(() if line.batch else line.waiting)]
                if line.batch is None:  # none can be made
                    line.waiting.clear()
                line.running, line.admitting, line.batch = {}, [], None
            self._deliver([(ticket, error) for ticket in lost])
            return
        self.metrics.step(time.monotonic() - begin, len(events))
        tickets = [line.running[event.row] for event in events]
        batch.cancel({ticket.number for ticket in tickets if ticket.error is not None})
        with self._changed:
            for event, ticket in zip(events, tickets, strict=True):
                if event.reason is not None or ticket.error is not None:
                    del line.running[event.row]
            self._measure()
        self._deliver([(ticket, ticket.error or event) for event, ticket in zip(events, tickets, strict=True)])

    def _draw(self, batch: ContinuousBatch, line: _Line) -> list[Event]:
        """A token of each request under way; idle slots are left out once they have cost what it takes to do so.

        To leave them out copies the others, and so does a next request. A copy takes about a row of a step for each
        slot that is copied. So the cost is at most twice that of knowing when the next request comes.
        """
        allocated, active = batch.allocated, len(line.running)
        line.idle = 0 if line.waiting else line.idle + allocated - active
        events = batch.draw(shrink=line.idle >= active)
        if batch.allocated != allocated:
            line.idle = 0
        return events

    def _admit(self, batch: ContinuousBatch, line: _Line) -> None:
        """Takes requests as slots become free, and computes a chunk of their prompts.

        An error of one request ends that one alone: where several were taken they wait again, to be taken one by one.
        """
        with self._changed:
            room = min(batch.room(), len(line.waiting), 1 if line.single else self.slots)
            taken = [line.waiting.popleft() for _ in range(room)]
            line.single -= min(line.single, room)
            line.running |= {ticket.number: ticket for ticket in taken}
            line.admitting = line.admitting + taken
        try:
            if taken:
                batch.take([(ticket.number, _guarded(ticket)) for ticket in taken])
            batch.prefill()
        except Exception as error:
            with self._changed:
                count = len(line.admitting)
                failed = [line.running.pop(one.number) for one in line.admitting if one.number in line.running]
                line.admitting = []
                if count > 1:
                    line.single = count
                    line.waiting.extendleft(reversed([one for one in failed if one not in self._cancelled]))
                self._measure()
            if count == 1:
                self._deliver([(ticket, error) for ticket in failed])
        else:
            line.admitting = line.admitting if batch.admitting else []

    def _empty_batch(self, model: Served) -> ContinuousBatch:
        settings = BatchSettings(model.tokenizer, kv_dtype=self._kv_dtype)
        capacity, slots = self.capacity, self.slots
        if is_invariant(self._kernel):  # whose tiles are full then, and read where they are
            capacity = -(-capacity // TILE) * TILE
        how: Any = {"settings": settings, "kernel": self._kernel}
        return ContinuousBatch(model.params, model.config, slots=slots, capacity=capacity, allocated=1, **how)


def _guarded(ticket: Ticket) -> Request:
    """The request of a ticket, whose `logits_fn` ends this ticket alone where it raises."""
    request = ticket.request
    assert request is not None
    edit = request.logits_fn
    if edit is None:
        return request

    def edited(logits: Tensor, tokens: list[int]) -> Tensor:
        try:
            return edit(logits, tokens)
        except Exception as error:
            ticket.error = error
            return logits

    return replace(request, logits_fn=edited)


def _scored(ticket: Ticket) -> int:
    """The tokens of a ticket's prompt."""
    return 0 if ticket.prompt is None else len(ticket.prompt.tokens)


def _scores(model: Served, tickets: Sequence[Ticket], kernel: Kernel) -> list[PromptScores | Exception]:
    """The scores of the prompts; where they fail together, those of each, or its own error."""
    prompts = [ticket.prompt for ticket in tickets if ticket.prompt is not None]
    try:
        return list(score_prompts(model.params, model.config, prompts, kernel=kernel))
    except Exception as error:
        return [error] if len(tickets) == 1 else [_scores(model, [ticket], kernel)[0] for ticket in tickets]

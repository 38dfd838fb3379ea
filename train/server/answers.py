"""The answers to one request over HTTP: tickets to the worker, and what comes of them, at once or streamed."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from train.generation.requests import Event, Request

from .errors import ApiError
from .metrics import Metrics
from .model import Model, Prompt
from .scores import PromptScores, ScoredPrompt
from .worker import Ticket, Worker

REASONS = {"stop_id": "stop", "stop_text": "stop", "max_new": "length"}
DONE = "data: [DONE]\n\n"


class ClientLeftError(Exception):
    """The client has closed the connection."""


@dataclass(frozen=True)
class TokenNats:
    """A token, its log-probability (None: of a prompt's first one) and the likeliest tokens of its place."""

    token: int
    logp: float | None
    likeliest: Sequence[tuple[int, float]] = ()


@dataclass
class Piece:
    """More of a choice: its text, its tokens where they are asked for, and why it ends (None: it goes on)."""

    text: str = ""
    tokens: list[TokenNats] = field(default_factory=list)
    reason: str | None = None

    def add(self, other: "Piece") -> None:
        """Joins what follows."""
        self.text += other.text
        self.tokens += other.tokens
        self.reason = other.reason


@dataclass(frozen=True)
class Asked:
    """The contents of a request that was checked.

    Args:
        prompts: The prompts; each has `n` choices, side by side.
        requests: One for each choice; empty where nothing is generated.
        n: Choices of each prompt.
        nats: How many of the likeliest tokens are named; None: no log-probabilities.
        echo: Whether choices begin with their prompts.
        stream: Whether pieces are sent as they come.
        usage: Whether a stream ends with the number of tokens.
        calls: Whether calls of tools are read out of the choices.
    """

    prompts: Sequence[Prompt]
    requests: Sequence[Request]
    n: int
    nats: int | None
    echo: bool
    stream: bool
    usage: bool
    calls: bool = False

    @property
    def choices(self) -> int:
        """The number of choices."""
        return len(self.prompts) * self.n


class Form(Protocol):
    """The format in which choices are written."""

    kind: str
    """The "object" of an answer."""
    chunk_kind: str
    """The "object" of a part of a stream."""
    prefix: str
    """Of the id."""

    def whole(self, piece: Piece, asked: Asked) -> dict[str, Any]:
        """A complete choice, without its index."""
        ...

    def chunk(self, piece: Piece, choice: int, asked: Asked, offset: int) -> dict[str, Any] | None:
        """A part of choice number `choice`; None: nothing to send yet. offset: the characters before it."""
        ...


class Call:
    """The choices of a request under way.

    Args:
        worker: The worker.
        model: The model that answers.
        asked: The request.
        metrics: What is counted.
    """

    def __init__(self, worker: Worker, model: Model, asked: Asked, metrics: Metrics) -> None:
        self._worker, self._model, self._asked, self._metrics = worker, model, asked, metrics
        self._ready, self._wake = list[tuple[int, Any]](), asyncio.Event()
        self._began, self._open = time.monotonic(), asked.choices
        self.generated, self._gone = 0, False
        self._tickets = [self._ticket(i, request=request) for i, request in enumerate(asked.requests)]
        if asked.echo and asked.nats is not None:
            self._tickets += [
                self._ticket(i * asked.n, prompt=ScoredPrompt(prompt.ids, likeliest=asked.nats))
                for i, prompt in enumerate(asked.prompts)
            ]
        worker.submit(model.served, self._tickets)
        metrics.add("prompt_tokens_total", sum(len(prompt.ids) for prompt in asked.prompts))

    def _ticket(self, choice: int, **what: Any) -> Ticket:
        kept = Piece()  # of an answer that is sent at once: nothing wakes up before its end

        def put(item: Any) -> None:
            if isinstance(item, Event):
                item = self._piece(item)
                if not self._asked.stream:
                    kept.add(item)
                    item = kept
                    if kept.reason is None:
                        return
            self._ready.append((choice, item))
            self._wake.set()

        return Ticket(put, **what)

    def left(self) -> None:
        """The client has closed the connection: `pieces` raises `ClientLeftError`, whatever is ready still."""
        self._gone = True
        self._worker.cancel(self._tickets)
        self._wake.set()

    async def pieces(self) -> AsyncIterator[dict[int, Piece]]:
        """{choice: what follows} of all that is ready, until all choices have ended; the worker forgets the rest where
        this is left early.

        Raises:
            ApiError: The worker could not answer.
            ClientLeftError: The client has left.
        """
        asked, late = self._asked, dict[int, list[Piece]]()
        try:
            waits = asked.echo and asked.nats is not None
            if asked.echo and not waits:
                reason = None if asked.requests else "length"
                texts = [prompt.text for prompt in asked.prompts for _ in range(asked.n)]
                yield {choice: Piece(text, [], reason) for choice, text in enumerate(texts)}
            scored = set[int]() if waits else set(range(len(asked.prompts)))
            left = len(asked.requests) + (len(asked.prompts) if waits else 0)
            while left:
                found = dict[int, Piece]()
                for choice, item in await self._all_ready():
                    number = choice // asked.n
                    if isinstance(item, Exception):
                        if found:
                            yield found
                        raise item if isinstance(item, ApiError) else _failed(item)
                    if isinstance(item, PromptScores):
                        left -= 1
                        scored.add(number)
                        for own in range(number * asked.n, (number + 1) * asked.n):
                            for piece in (self._echoed(item, asked.prompts[number]), *late.pop(own, ())):
                                found.setdefault(own, Piece()).add(piece)
                        continue
                    left -= item.reason is not None
                    if number in scored:
                        found.setdefault(choice, Piece()).add(item)
                    else:
                        late.setdefault(choice, []).append(item)
                if found:
                    yield found
            self._metrics.observe("request_seconds", time.monotonic() - self._began)
        finally:
            self._worker.cancel(self._tickets)

    async def _all_ready(self) -> list[tuple[int, Any]]:
        """What has come since the last call, at least one item. ClientLeftError where the client has left."""
        await self._wake.wait()
        self._wake.clear()
        if self._gone:
            raise ClientLeftError
        ready, self._ready = self._ready, []
        return ready

    def _piece(self, event: Event) -> Piece:
        if self.generated == 0:
            self._metrics.observe("first_token_seconds", time.monotonic() - self._began)
        self.generated += 1
        reason = None if event.reason is None else REASONS[event.reason]
        tokens = [] if self._asked.nats is None else [TokenNats(event.token, event.logp, event.likeliest)]
        return Piece(event.text, tokens, reason)

    def _echoed(self, scores: PromptScores, prompt: Prompt) -> Piece:
        tokens = []
        for token, logp, likeliest in zip(prompt.ids, scores.logp, scores.likeliest, strict=True):
            best = tuple(likeliest or ())[: self._asked.nats]
            if logp is not None and token not in dict(best):
                best += ((token, logp),)
            tokens.append(TokenNats(token, logp, best))
        return Piece(prompt.text, tokens, None if self._asked.requests else "length")


def _failed(error: Exception) -> ApiError:
    return ApiError(500, f"The model could not answer: {type(error).__name__}: {error}")


def failure(error: ApiError) -> str:
    """The last events of a stream that ends with an error."""
    return f"data: {json.dumps(error.content)}\n\n{DONE}"


class Answer:
    """The answer to a request, in the form of its route.

    Args:
        call: The choices under way.
        asked: The request.
        form: How choices are written.
        model: The model that answers.
    """

    def __init__(self, call: Call, asked: Asked, form: Form, model: Model) -> None:
        self._call, self._asked, self._form = call, asked, form
        self._head = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model.name}
        self._begin = f"data: {json.dumps(self._head | {'object': form.chunk_kind})[:-1]}, "

    async def whole(self) -> dict[str, Any]:
        """The answer when all choices have ended."""
        found = [Piece() for _ in range(self._asked.choices)]
        async for ready in self._call.pieces():
            for choice, piece in ready.items():
                found[choice].add(piece)
        choices = [{"index": i, **self._form.whole(piece, self._asked)} for i, piece in enumerate(found)]
        return {**self._head, "object": self._form.kind, "choices": choices, "usage": self._usage()}

    async def stream(self) -> AsyncGenerator[str]:
        """Server-sent events, those that are ready in one text, the last one [DONE]; an error is one of them."""
        offsets = dict[int, int]()
        try:
            async for ready in self._call.pieces():
                events = list[str]()
                for choice, piece in ready.items():
                    if not (piece.text or piece.reason or piece.tokens):
                        continue  # text is held back until no later token changes it
                    offset = offsets.get(choice, 0)
                    written = self._form.chunk(piece, choice, self._asked, offset)
                    offsets[choice] = offset + len(piece.text)
                    if written is not None:
                        events.append(self._event({"choices": [{"index": choice, **written}]}))
                if events:
                    yield "".join(events)
            if self._asked.usage:
                yield self._event({"choices": [], "usage": self._usage()})
        except ApiError as error:
            yield failure(error)
            return
        yield DONE

    def _event(self, content: dict[str, Any]) -> str:
        return f"{self._begin}{json.dumps(content)[1:]}\n\n"

    def _usage(self) -> dict[str, int]:
        prompt, new = sum(len(prompt.ids) for prompt in self._asked.prompts), self._call.generated
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

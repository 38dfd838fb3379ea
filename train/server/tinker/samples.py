"""Answers for Tinker's clients: the request of `/asample`, and what the worker finds for it."""

import base64
import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from train.generation.requests import Event, Request
from train.integrations.tinker import types
from train.integrations.tinker.base import Base
from train.integrations.tinker.images import IMAGE, POINTER, TEXT, InputReader, InputTokens

from ..answers import REASONS
from ..body import Body
from ..errors import ApiError
from ..model import PICTURES
from ..sampled import truncated
from ..scores import PromptScores
from ..worker import Ticket
from .asked import LIKELIEST, AskedOfPrompt
from .sequences import Recorded
from .wire import Drawn, sample_output

SAMPLES = 1024  # answers of one request, at most
HEAD = 256  # bytes of a message, and of an answer in it, beside its arrays
NAME = (("type", "sample"),)  # of the request, which Tinker's package repeats


class Sample:
    """The answers to a prompt.

    Args:
        body: The request.
        n: Answers.
        base: The base model, which says how pictures are read.
        ends: Token ids that end an answer, unless the request says otherwise.
        capacity: Tokens of a prompt and an answer at most.
        done: Called with the message, or with an exception.
        routed: Whether the model has experts, which are then recorded where the request asks for it.
    """

    def __init__(
        self,
        body: Body,
        n: int,
        base: Base,
        ends: tuple[int, ...],
        capacity: int,
        done: Callable[[Any], None],
        routed: bool = False,
    ) -> None:
        self._done, self._failed = done, False
        self.records = body.flag("record_stability_info") and routed
        self._experts: list[list[Tensor]] = [[] for _ in range(n)]
        body.take("sampling_session_id"), body.take("seq_id"), body.take("base_model")
        read = _prompt(body, base, capacity)
        self.prompt, self._images = read.tokens, read.images
        vocab = base.config.vocab_size
        self._asked = AskedOfPrompt.of(body, len(self.prompt), vocab)
        self._answer_k = body.integer("topk_sample_logprobs", 0, high=LIKELIEST)
        how = body.object("sampling_params") or Body({}, "sampling_params.")
        self.requests = self._requests(how, n, ends, capacity)
        how.finish((("type", "sampling_params"),))
        body.finish(NAME)
        self._answers = [Drawn([], [], False, []) for _ in range(n)]
        self._scores: PromptScores | None = None
        self._open = n
        self.tickets = [Ticket(self._put(i), request=one) for i, one in enumerate(self.requests)]
        first = self.requests[0]
        temperature = float(first.sampling.temperature)
        scored = self._asked.scored(self.prompt, self._images, temperature, first.seed)
        if scored is not None:
            self.tickets.append(Ticket(self._put(None), prompt=scored))
            self._open += 1

    def _requests(self, how: Body, n: int, ends: tuple[int, ...], capacity: int) -> list[Request]:
        stop: Any = how.take("stop")
        listed = [stop] if isinstance(stop, str) else stop or []
        if not isinstance(listed, list) or not all(isinstance(one, str) or type(one) is int for one in listed):
            raise how.wrong("stop", "a text, or a list of texts or of token ids")
        ids = ends if stop is None else tuple(one for one in listed if isinstance(one, int))
        texts = tuple(one for one in listed if isinstance(one, str))
        seed = how.integer("seed", secrets.randbits(31))
        new = how.integer("max_tokens", max(1, capacity - len(self.prompt)), low=1)
        sampling = truncated(how)
        return [
            Request(
                self.prompt,
                new,
                sampling,
                seed,
                draw,
                ids,
                texts,
                self._images,
                likeliest=self._answer_k,
                record_routing=self.records,
            )
            for draw in range(n)
        ]

    def _put(self, answer: int | None) -> Callable[[Any], None]:
        def put(item: Any) -> None:
            if isinstance(item, Exception):
                self._failed = True
                self._done(item)
                return
            if isinstance(item, PromptScores):
                self._scores = item
                self._open -= 1
            elif isinstance(item, Event) and answer is not None:
                self._append(answer, item)
            if self._open == 0 and not self._failed:
                self._done(self._message())

        return put

    def _append(self, answer: int, event: Event) -> None:
        found = self._answers[answer]
        found.tokens.append(event.token)
        found.logp.append(event.logp)
        found.likeliest.append(event.likeliest)
        if event.routing is not None:
            self._experts[answer].append(event.routing)
        if event.reason is not None:
            stopped = REASONS[event.reason] == "stop"
            self._answers[answer] = Drawn(found.tokens, found.logp, stopped, found.likeliest)
            self._open -= 1

    def most(self) -> int:
        """Bytes of the message at most."""
        tokens = sum(request.max_new for request in self.requests)
        head = HEAD * (1 + len(self.requests))
        return head + tokens * (8 + 8 * self._answer_k) + self._asked.most(len(self.prompt))

    def recorded(self) -> list[Recorded]:
        """The answers with their experts, where they are recorded."""
        if not self.records:
            return []
        return [
            Recorded(self.prompt, found.tokens, torch.cat(experts))
            for found, experts in zip(self._answers, self._experts, strict=True)
        ]

    def _message(self) -> bytes:
        return sample_output(self._answers, self._asked.answer(self._scores), self._answer_k, self._asked.likeliest)


def _prompt(body: Body, base: Base, capacity: int) -> InputTokens:
    given = body.object("prompt")
    chunks: Any = None if given is None else given.take("chunks")
    if given is None or not isinstance(chunks, list) or not chunks:
        raise body.wrong("prompt", "an object with at least one chunk")
    given.finish()
    found = [_chunk(Body(one if isinstance(one, dict) else {}, f"prompt.chunks[{i}].")) for i, one in enumerate(chunks)]
    try:
        reader = InputReader(base, files=False, most=PICTURES, context=capacity)
        return reader.read(types.ModelInput(found), "the prompt")
    except ValueError as error:
        raise ApiError(400, str(error), param="prompt") from error


def _chunk(body: Body) -> types.Chunk:
    kind = body.take("type")
    if kind == TEXT:
        tokens = body.take("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise body.wrong("tokens", "a list of token ids")
        found: types.Chunk = types.EncodedTextChunk(tokens)
    elif kind in (IMAGE, POINTER):
        named: dict[str, Any] = {"format": body.needed("format"), "expected_tokens": body.integer("expected_tokens")}
        if kind == POINTER:
            found = types.ImageAssetPointerChunk(body.needed("location"), **named)
        else:
            found = types.ImageChunk(_bytes(body), **named)
    else:
        raise body.wrong("type", f"one of {TEXT}, {IMAGE} and {POINTER}")
    body.finish()
    return found


def _bytes(body: Body) -> bytes:
    try:
        return base64.b64decode(body.needed("data"), validate=True)
    except ValueError as error:  # of other characters, and binascii.Error
        raise ApiError(400, f"The data of an image are not base64: {error}.", param="prompt") from error

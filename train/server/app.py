"""The routes of the server, as an application of Starlette."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from fnmodels.options import Kernel

from . import chat, completions
from .answers import Answer, Asked, Call, ClientLeftError, Form, failure
from .body import Body, parsed
from .errors import ApiError, stopped
from .grammar import Grammars
from .guard import Guard, Message, Receive, Send, error_response, read_body
from .metrics import Metrics
from .model import Model
from .worker import Ticket, Worker

AT_ONCE = 1 << 16  # bytes of JSON that are read in less time than a change of threads is worth


@dataclass(frozen=True)
class Limits:
    """The bounds of a server.

    Args:
        slots: Answers that are drawn at once.
        context: Tokens of a prompt and its answer at most.
        queue: Requests that may wait.
        body: Bytes of a request at most.
    """

    slots: int = 32
    context: int = 4096
    queue: int = 1024
    body: int = 32 << 20


class Service:
    """A model and its worker behind the routes.

    Args:
        model: The model that answers.
        limits: The bounds.
        kv_dtype: Of the cache: torch.int8, or None for that of the activations.
        kernel: Of all passes, see `fnmodels.forward`.
    """

    def __init__(
        self, model: Model, limits: Limits, kv_dtype: torch.dtype | None = None, kernel: Kernel = "auto"
    ) -> None:
        self.model, self.limits, self.metrics = model, limits, Metrics()
        self.grammars = Grammars(model.tokenizer, model.vocab_size, model.ends)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._kv_dtype, self.kernel = kv_dtype, kernel
        self._worker: Worker | None = None
        # one thread: tokenizers and grammars of long requests must not hold up the others
        self.texts = ThreadPoolExecutor(1, "fnmodels-texts")

    @property
    def worker(self) -> Worker:
        """The worker, which runs as long as the server does."""
        assert self._worker is not None, "the server has not started"
        return self._worker

    @asynccontextmanager
    async def running(self, app: Any) -> AsyncIterator[None]:
        """The lifespan of the application."""
        self._loop = asyncio.get_running_loop()
        limits = self.limits
        self._worker = Worker(
            slots=limits.slots,
            capacity=limits.context,
            queue=limits.queue,
            deliver=self._deliver,
            metrics=self.metrics,
            kv_dtype=self._kv_dtype,
            kernel=self.kernel,
            base=self.model.served,
        )
        try:
            yield
        finally:
            await asyncio.to_thread(self._worker.stop)
            self.texts.shutdown()

    def drain(self) -> None:
        """Takes no more requests, and answers those that wait: the server is stopping."""
        self.worker.drain()

    def _deliver(self, ready: list[tuple[Ticket, Any]]) -> None:
        """Hands a step's events to the server's thread, in one call."""
        if ready and self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: the server has ended
                self._loop.call_soon_threadsafe(_put, ready)

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function of texts, beside the server's thread."""
        return await asyncio.get_running_loop().run_in_executor(self.texts, function, *arguments)

    async def body(self, request: HttpRequest) -> Body:
        """The fields of a request. Large ones are read beside the server's thread."""
        data = await read_body(request, self.limits.body)
        return Body(await self.in_thread(parsed, data) if len(data) > AT_ONCE else parsed(data))

    async def answer(self, request: HttpRequest, asked: Asked, form: Form) -> Response:
        """The answer, streamed or at once; the worker stops where the client leaves."""
        await self.in_thread(self._check, asked)
        call = Call(self.worker, self.model, asked, self.metrics)
        watch = asyncio.create_task(_watch(request, call))
        answer = Answer(call, asked, form, self.model)
        if asked.stream:
            return EventStream(answer.stream(), watch)
        try:
            return JSONResponse(await answer.whole())
        finally:
            watch.cancel()

    def _check(self, asked: Asked) -> None:
        for i, one in enumerate(asked.requests[:: asked.n]):
            self.worker.check(self.model.served, one, i)
        longest = max(len(prompt.ids) for prompt in asked.prompts)
        if longest > self.limits.context:
            raise ApiError(
                400, f"A prompt has {longest} tokens; the context is {self.limits.context} tokens.", param="prompt"
            )


def _put(ready: list[tuple[Ticket, Any]]) -> None:
    for ticket, item in ready:
        ticket.put(item)


async def _watch(request: HttpRequest, call: Call) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    call.left()


class EventStream(Response):
    """Server-sent events.

    Args:
        events: The lines.
        watch: The task that notices that the client leaves.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str], watch: "asyncio.Task[None]") -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._watch = events, watch

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Sends the events as they come."""
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (ClientLeftError, OSError):
            pass  # there is nobody to tell
        except asyncio.CancelledError:  # the server stops, and the time for its answers is over
            await send({"type": "http.response.body", "body": failure(stopped()).encode()})
        finally:
            self._watch.cancel()
            await self._events.aclose()


def application(service: Service, *, token: str | None = None, routes: list[Route] | None = None) -> Guard:
    """The application of ASGI.

    Args:
        service: The model and its worker.
        token: What requests must carry; None: nothing, for a server that listens on this machine alone.
        routes: Further routes, such as Tinker's.

    Returns:
        The application.

    Raises:
        UserError: The token is empty.
    """

    async def completion(request: HttpRequest) -> Response:
        body = await service.body(request)
        asked = await service.in_thread(
            completions.asked_of, body, service.model, service.grammars, service.worker.check_room
        )
        return await service.answer(request, asked, completions.CompletionForm(service.model))

    async def chat_completion(request: HttpRequest) -> Response:
        body, context = await service.body(request), service.limits.context
        made_of = body, service.model, service.grammars, service.worker.check_room, context
        asked = await service.in_thread(chat.asked_of, *made_of)
        return await service.answer(request, asked, chat.ChatForm(service.model))

    async def models(request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [_described(service)]})

    async def one_model(request: HttpRequest) -> Response:
        service.model.check_name(request.path_params["name"])
        return JSONResponse(_described(service))

    async def health(request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(request: HttpRequest) -> Response:
        return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4")

    app = Starlette(
        routes=[
            Route("/v1/completions", completion, methods=["POST"]),
            Route("/v1/chat/completions", chat_completion, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", one_model),
            Route("/health", health),
            Route("/metrics", metrics),
            *(routes or []),
        ],
        exception_handlers={
            ApiError: _refused,
            HTTPException: _of_routes,
            Exception: _unexpected,
            ClientLeftError: _of_nobody,
            ClientDisconnect: _of_nobody,
        },
        lifespan=service.running,
    )
    return Guard(app, token, service.metrics)


# Coroutines: Starlette would run functions in threads, which wait for the interpreter beside the worker.
async def _refused(request: HttpRequest, error: Any) -> Response:
    return error_response(error)


async def _of_routes(request: HttpRequest, error: Any) -> Response:
    return error_response(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}."))


async def _unexpected(request: HttpRequest, error: Any) -> Response:
    return error_response(ApiError(500, f"The server failed: {type(error).__name__}."))


async def _of_nobody(request: HttpRequest, error: Any) -> Response:
    return Response(status_code=499)  # the client has left


def _described(service: Service) -> dict[str, Any]:
    limits = service.limits
    return {
        "id": service.model.name,
        "object": "model",
        "created": 0,
        "owned_by": "fnmodels",
        "max_model_len": limits.context,
    }

"""Middleware in front of all routes: the token and the size of each request, and counters."""

import asyncio
import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse

from fnmodels.errors import UserError

from .errors import ApiError, stopped
from .metrics import Metrics

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
OPEN = ("/health", "/api/v1/healthz")  # without a token
SECONDS = 60.0  # in which a body arrives
LINGER = 5.0  # seconds without data, after which the rest of a refused body is not waited for


def error_response(error: ApiError) -> JSONResponse:
    """The answer of an error."""
    return JSONResponse(error.content, error.status, error.headers)


def is_loopback(host: str) -> bool:
    """Whether a name or address is that of this machine alone."""
    try:
        return host == "localhost" or ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """Refuses requests without the token, and counts all.

    Without a token the server listens on this machine alone; then requests whose Host or Origin is another one come
    from pages in a browser, and are refused.

    Args:
        app: The routes.
        token: What requests carry as "Authorization: Bearer TOKEN" or "X-API-Key: TOKEN"; None: nothing.
        metrics: What is counted.

    Raises:
        UserError: The token is empty.
    """

    def __init__(self, app: App, token: str | None, metrics: Metrics) -> None:
        if token is not None and not token.strip():
            raise UserError(f"the token is {token!r}; it must not be empty: pass None for a server without a token")
        self._app, self._token, self._metrics = app, token, metrics

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answers a request."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # no route is a web socket
            return await send({"type": "websocket.close", "code": 1008})
        request, arriving, status = HttpRequest(scope), True, 0

        async def noted() -> Message:
            nonlocal arriving
            message = await receive()
            arriving = message.get("more_body", False)
            return message

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                route = getattr(scope.get("endpoint"), "__name__", "none")
                self._metrics.add("requests_total", route=route, status=str(status))
            elif status >= 400 and arriving and not message.get("more_body", False):
                # The end of the answer may close the connection. A close while data arrive resets it, and a client
                # that is still sending would not see the answer.
                await send({**message, "more_body": True})
                with suppress(TimeoutError):
                    async with asyncio.timeout(SECONDS):
                        while arriving:
                            await asyncio.wait_for(noted(), LINGER)
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        error = self._refusal(request)
        try:
            await (self._app if error is None else error_response(error))(scope, noted, counted)
        except asyncio.CancelledError:  # the server stops; uvicorn would answer with a plain 500, and log each request
            if not status:
                with suppress(asyncio.CancelledError):
                    await error_response(stopped())(scope, noted, counted)

    def _refusal(self, request: HttpRequest) -> ApiError | None:
        if self._token is None:
            for name in ("host", "origin"):
                given = request.headers.get(name)
                host = (given or "localhost").rpartition("//")[2]
                host = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
                if not is_loopback(host):
                    return ApiError(403, f"The {name} is {given!r}; without a token only this machine may ask.")
            return None
        if request.scope["path"] in OPEN:  # not that of the URL, which is made of the Host header too
            return None
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        if hmac.compare_digest(given.encode(), self._token.encode()):
            return None
        return ApiError(401, "The token is missing or wrong: send it as 'Authorization: Bearer TOKEN'.")


async def read_body(request: HttpRequest, limit: int) -> bytes:
    """The body of a request. ApiError for one that is too large, or that does not arrive."""
    too_large = ApiError(413, f"The body is larger than {limit:,} bytes, the limit of this server.")
    size = request.headers.get("content-length", "0")
    if size.isdecimal() and int(size) > limit:
        raise too_large
    parts, total = list[bytes](), 0
    try:
        async with asyncio.timeout(SECONDS):
            async for part in request.stream():
                parts.append(part)
                total += len(part)
                if total > limit:
                    raise too_large
    except TimeoutError as error:
        raise ApiError(408, f"The body did not arrive within {SECONDS:g} seconds.") from error
    return b"".join(parts)

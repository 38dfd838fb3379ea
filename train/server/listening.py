"""`Listening`: uvicorn, which says where it listens once it does, and `Bounded`, its protocol with limits of time."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds for which the server's thread keeps the interpreter from the worker's, which asks for it after each operation.
SWITCH = 0.0005
SECONDS = 30.0  # in which the head of a request arrives, from the connection or the first byte behind another request
UNREAD = 30.0  # after which a client that has read nothing of what is to be sent is disconnected, at most twice as late
REFUSED = 5.0  # for which a client whose bytes are no HTTP may go on to send them behind the refusal
LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Bounded(H11Protocol):
    """HTTP/1.1 over one connection, which ends where the client neither sends nor reads.

    uvicorn limits the time between two requests alone. Connections that send nothing, or a byte of a head now and then,
    would stay for ever, and so would those that stop reading an answer.
    """

    _late: asyncio.TimerHandle | None = None
    _refused: asyncio.TimerHandle | None = None
    _check: asyncio.TimerHandle
    _unread = 0

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for a head, and to look at what is read."""
        super().connection_made(transport)
        self._wait()
        self._check = self.loop.call_later(UNREAD, self._end_unread)

    def data_received(self, data: bytes) -> None:
        """Reads; of a head alone, the time goes on. Behind a refusal nothing is read."""
        if self._refused is not None:
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end_wait()
        elif self._late is None and not self.transport.is_closing():
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all of them."""
        self._end_wait()
        self._check.cancel()
        if self._refused is not None:
            self._refused.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that are no HTTP.

        The connection stays open for what the client still sends: a close while data arrive resets it, and the client
        would not see the answer.
        """
        headers = [("content-type", "text/plain; charset=utf-8"), ("connection", "close")]
        refusal = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (refusal, h11.Data(data=msg.encode()), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.write_eof()
        self._refused = self.loop.call_later(REFUSED, self.transport.close)

    def _wait(self) -> None:
        self._late = self.loop.call_later(SECONDS, self._end)

    def _end_wait(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        if self.conn.trailing_data[0]:  # a part of a head
            self.transport.write(LATE)
        self.transport.close()

    def _end_unread(self) -> None:
        """Ends the connection if the client has read nothing since the last time, and with it its request."""
        full = self.flow.write_paused or self.transport.is_closing()  # then nothing is added to what is unread
        unread = self.transport.get_write_buffer_size() if full else 0
        if unread and unread == self._unread:
            self.transport.abort()
        else:
            self._unread, self._check = unread, self.loop.call_later(UNREAD, self._end_unread)


class Listening(uvicorn.Server):
    """A server that prints its address.

    Args:
        app: The application of ASGI.
        name: Of the model, for the line.
        port: Where it listens; 0: a free one.
        grace: Seconds in which running requests end when it is stopped.
        drain: Called when it is stopped, before these seconds: what is not under way needs none.
        **settings: Further ones of `uvicorn.Config`.
    """

    def __init__(
        self, app: Any, name: str, *, port: int, grace: int, drain: Callable[[], None], **settings: Any
    ) -> None:
        quiet: dict[str, Any] = {"log_level": "warning", "access_log": False}
        super().__init__(
            uvicorn.Config(app, port=port, http=Bounded, timeout_graceful_shutdown=grace, **quiet, **settings)
        )
        self._model, self._drain = name, drain
        self.urls: list[str] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        for listener in getattr(self, "servers", []):
            host, port = listener.sockets[0].getsockname()[:2]
            self.urls.append(f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1")
            print(f"{self._model} answers at {self.urls[-1]}", flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends requests that wait, and waits for those that run."""
        self._drain()
        await super().shutdown(sockets)

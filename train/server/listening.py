"""`Listening`: uvicorn, which says where it listens once it does, and `Heads`, its protocol with a time for heads."""

import asyncio
import socket
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

# Seconds for which the server's thread keeps the interpreter from the worker's, which asks for it after each operation.
SWITCH = 0.0005
SECONDS = 30.0  # in which the head of a request arrives, from the connection or the first byte behind another request
LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Heads(H11Protocol):
    """HTTP/1.1 over one connection, which ends where the head of a request does not arrive within `SECONDS`.

    uvicorn limits the time between two requests alone: connections that send nothing, or a byte now and then, would
    stay for ever.
    """

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for a head."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Reads; of a head alone, the time goes on."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end_wait()
        elif self._late is None and not self.transport.is_closing():
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the wait."""
        self._end_wait()
        super().connection_lost(exc)

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


class Listening(uvicorn.Server):
    """A server that prints its address.

    Args:
        app: The application of ASGI.
        name: Of the model, for the line.
        port: Where it listens; 0: a free one.
        grace: Seconds in which running requests end when it is stopped.
        **settings: Further ones of `uvicorn.Config`.
    """

    def __init__(self, app: Any, name: str, *, port: int, grace: int, **settings: Any) -> None:
        quiet: dict[str, Any] = {"log_level": "warning", "access_log": False}
        super().__init__(
            uvicorn.Config(app, port=port, http=Heads, timeout_graceful_shutdown=grace, **quiet, **settings)
        )
        self._model = name
        self.urls: list[str] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        for listener in getattr(self, "servers", []):
            host, port = listener.sockets[0].getsockname()[:2]
            self.urls.append(f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1")
            print(f"{self._model} answers at {self.urls[-1]}", flush=True)

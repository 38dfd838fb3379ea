"""`Listening`: uvicorn, which says where it listens once it does."""

import socket

import uvicorn

# Seconds for which the server's thread keeps the interpreter from the worker's, which asks for it after each operation.
SWITCH = 0.0005


class Listening(uvicorn.Server):
    """A server that prints its address.

    Args:
        config: Of uvicorn.
        name: Of the model, for the line.
    """

    def __init__(self, config: uvicorn.Config, name: str) -> None:
        super().__init__(config)
        self._model = name
        self.urls: list[str] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to listen."""
        await super().startup(sockets)
        for listener in getattr(self, "servers", []):
            host, port = listener.sockets[0].getsockname()[:2]
            self.urls.append(f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1")
            print(f"{self._model} answers at {self.urls[-1]}", flush=True)

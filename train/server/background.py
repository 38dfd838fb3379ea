"""A server in a thread of this process, for notebooks and tests."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fnmodels.options import Kernel

from .app import Limits, Service, application
from .listening import Listening
from .model import load
from .tinker.kept import Bounds
from .tinker.routes import tinker_routes
from .tinker.trainer import Trainer


@dataclass(frozen=True)
class Running:
    """A server that runs.

    Args:
        url: Where it listens, with /v1 at its end.
        service: The model and its worker.
    """

    url: str
    service: Service


@contextmanager
def background(
    folder: Path,
    name: str | None = None,
    *,
    limits: Limits | None = None,
    token: str | None = None,
    port: int = 0,
    saves: Path | None = None,
    kernel: Kernel = "auto",
    bounds: Bounds | None = None,
) -> Iterator[Running]:
    """Serves a folder's model on this machine as long as the block runs, and ends requests under way within seconds.

    Args:
        folder: A checkpoint.
        name: Of the model in requests; None: that of the folder.
        limits: The bounds; None: the default ones.
        token: What requests must carry; None: nothing.
        port: Where it listens; 0: a free one.
        saves: Where the clients of Tinker's protocol save weights; None: the server does not train.
        kernel: Of all passes, see `fnmodels.forward`.
        bounds: What is kept for the clients of Tinker's protocol; None: the default ones.

    Yields:
        The server.

    Raises:
        RuntimeError: It does not start, as where the port is in use.
        UserError: The token is empty.
    """
    service = Service(load(folder, name), limits or Limits(), kernel=kernel)
    routes = None if saves is None else tinker_routes(Trainer(service, saves, bounds))
    app = application(service, token=token, routes=routes)
    server = Listening(app, service.model.name, port=port, grace=10, drain=service.drain)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.urls:
        if not thread.is_alive():
            raise RuntimeError(f"The server did not start on port {port}; its message is on standard error.")
        time.sleep(0.005)
    try:
        yield Running(server.urls[0], service)
    finally:
        server.should_exit = True
        thread.join()

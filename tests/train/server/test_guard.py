"""What stands in front of the routes: tokens, paths that need none, and scopes that are no requests."""

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from fnmodels.errors import UserError
from tests.support.served import serving, write_checkpoint

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


async def _app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "reached"})


def _sent(scope: dict[str, Any], token: str | None) -> list[Any]:
    """The messages that an application behind the guard sends."""
    from train.server.guard import Guard
    from train.server.metrics import Metrics

    found: list[Any] = []

    async def send(message: Any) -> None:
        found.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    asyncio.run(Guard(_app, token, Metrics())(scope, receive, send))
    return found


def _scope(path: str, host: bytes) -> dict[str, Any]:
    scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b""}
    return scope | {"scheme": "http", "root_path": "", "server": ("127.0.0.1", 80), "headers": [(b"host", host)]}


def test_a_host_that_looks_like_an_open_path_needs_the_token() -> None:
    for host in (b"x/health?", b"x/health#", b"x/api/v1/healthz?"):
        found = _sent(_scope("/v1/models", host), "secret")
        assert [one.get("status") for one in found][:1] == [401]
    assert _sent(_scope("/health", b"x"), "secret") == [{"type": "reached"}]


def test_the_path_that_is_exempt_is_that_of_the_scope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older releases of Starlette read /health out of such a Host."""
    from starlette.requests import Request

    monkeypatch.setattr(Request, "url", property(lambda self: type("URL", (), {"path": "/health"})()))
    assert _sent(_scope("/v1/models", b"x"), "secret")[0]["status"] == 401


@pytest.mark.parametrize("token", ["secret", None])
def test_a_web_socket_is_closed(token: str | None) -> None:
    scope = _scope("/v1/models", b"localhost") | {"type": "websocket"}
    assert _sent(scope, token) == [{"type": "websocket.close", "code": 1008}]
    assert _sent({"type": "lifespan"}, token) == [{"type": "reached"}]


@pytest.mark.parametrize("token", ["", " "])
def test_an_empty_token_is_refused(token: str, tmp_path: Path) -> None:
    from train.server.app import Limits, Service, application
    from train.server.background import background
    from train.server.command import checked_token
    from train.server.model import load

    folder = write_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(UserError, match="it must not be empty"):
        application(Service(load(folder), Limits()), token=token)
    with pytest.raises(UserError, match="it must not be empty"), background(folder, token=token):
        raise AssertionError
    with pytest.raises(UserError, match="--token is empty"):
        checked_token("127.0.0.1", token)


def test_a_raw_request_with_such_a_host_is_refused(tmp_path: Path) -> None:
    with (
        serving(write_checkpoint(tmp_path / "checkpoint"), token="secret") as server,
        socket.create_connection((server.host, server.port)) as made,
    ):
        made.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x/health?\r\nConnection: close\r\n\r\n")
        first = made.recv(64)
    assert first.split()[1] == b"401"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_of_a_refused_body_first_reads_the_answer(tmp_path: Path, chunked: bool) -> None:
    """With a connection that ends behind the answer, as those of urllib do."""
    size = 1 << 24  # more than sockets hold
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % size
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"a" * size) if chunked else b"a" * size
    with serving(write_checkpoint(tmp_path / "checkpoint"), token="secret", body=1000) as server:
        for token, status in ((b"secret", b"413"), (b"other", b"401")):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + framing
            with socket.create_connection((server.host, server.port), timeout=60) as made:
                made.sendall(head + b"\r\nAuthorization: Bearer " + token + b"\r\n\r\n" + body)
                answer = b"".join(iter(lambda made=made: made.recv(4096), b""))
            assert answer.split()[1] == status and answer.endswith(b"}")


def test_a_refused_body_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from train.server import guard

    monkeypatch.setattr(guard, "LINGER", 0.2)
    with (
        serving(write_checkpoint(tmp_path / "checkpoint"), body=1000) as server,
        socket.create_connection((server.host, server.port), timeout=60) as made,
    ):
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2000\r\n\r\n"
        made.sendall(head + b"a")
        answer = b"".join(iter(lambda: made.recv(4096), b""))
    assert answer.split()[1] == b"413"


def test_a_client_that_sends_no_http_sees_the_refusal_behind_all_that_it_sends(tmp_path: Path) -> None:
    """A reset in place of the answer would be what a close while data arrive makes of it."""
    with serving(write_checkpoint(tmp_path / "checkpoint")) as server:
        for size in (10, 100_000, 8_000_000):
            with socket.create_connection((server.host, server.port)) as client:
                client.sendall(b"a" * size + b"\r\n\r\n")
                client.settimeout(30)
                answer = b""
                while part := client.recv(65536):
                    answer += part
            assert answer.startswith(b"HTTP/1.1 400 ") and b"Invalid HTTP request received." in answer
        assert server.send("/health")[0] == 200


def _send_on(client: socket.socket) -> None:
    for _ in range(200):
        client.sendall(b"a" * 100_000)
        time.sleep(0.02)


def test_a_refused_client_that_goes_on_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.server.listening.REFUSED", 0.2)
    with serving(write_checkpoint(tmp_path / "checkpoint")) as server:
        with socket.create_connection((server.host, server.port)) as client:
            client.settimeout(10)
            client.sendall(b"a" * 100_000)
            with pytest.raises(OSError):
                _send_on(client)
        assert server.send("/health")[0] == 200

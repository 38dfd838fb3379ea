"""Connections that send no head of a request, or a part of one, end after a time; others are answered."""

import socket
import time
from pathlib import Path

import pytest

from tests.support.served import serving, write_checkpoint

pytest.importorskip("uvicorn")
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    from train.server import listening

    monkeypatch.setattr(listening, "SECONDS", 0.5)


def _answer(made: socket.socket) -> bytes:
    return b"".join(iter(lambda: made.recv(4096), b""))


def _trickle(made: socket.socket) -> bytes:
    """Sends a header again and again until the server has closed the connection; what it said."""
    made.settimeout(0.1)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            return made.recv(4096)
        except TimeoutError:
            made.sendall(b"X-A: b\r\n")
    raise AssertionError("the connection stays")


def test_a_connection_that_sends_nothing_ends(folder: Path) -> None:
    with serving(folder) as server, socket.create_connection((server.host, server.port), timeout=60) as made:
        assert _answer(made) == b""


def test_a_head_that_trickles_in_ends_with_a_status(folder: Path) -> None:
    with serving(folder) as server, socket.create_connection((server.host, server.port), timeout=60) as made:
        made.sendall(HEAD)
        assert _trickle(made).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert server.send("/health")[0] == 200


def test_a_head_that_trickles_in_behind_a_request_ends_with_a_status(folder: Path) -> None:
    with serving(folder) as server, socket.create_connection((server.host, server.port), timeout=60) as made:
        made.sendall(HEAD + b"\r\n")
        first = b""
        while not first.endswith(b"}"):  # head and body may come one after the other
            first += made.recv(4096)
        assert first.startswith(b"HTTP/1.1 200")
        made.sendall(HEAD)
        found = _trickle(made)
        assert b"408 Request Timeout" in found


def test_an_answer_may_take_longer_than_a_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from train.generation.batching import ContinuousBatch

    draw = ContinuousBatch.draw
    monkeypatch.setattr(ContinuousBatch, "draw", lambda self, **how: (time.sleep(0.2), draw(self, **how))[1])
    with serving(folder) as server:
        status, answer, _ = server.send("/v1/completions", {"prompt": "a", "max_tokens": 6, "ignore_eos": True})
    assert status == 200 and answer["usage"]["completion_tokens"] == 6

"""Clients that stop reading are disconnected, and their requests end; slow readers have all of their answers."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import Served, serving, write_checkpoint

pytest.importorskip("uvicorn")
UNREAD = 1.0
BUFFER = 4096  # bytes that the kernel holds, or a few times as many
CHOICES = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "checkpoint")


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    from train.generation.batching import ContinuousBatch
    from train.server import listening

    made, draw = listening.Bounded.connection_made, ContinuousBatch.draw

    def small(self: Any, transport: Any) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        made(self, transport)

    monkeypatch.setattr(listening, "UNREAD", UNREAD)
    monkeypatch.setattr(listening.Bounded, "connection_made", small)
    monkeypatch.setattr(ContinuousBatch, "draw", lambda self, **how: (time.sleep(0.02), draw(self, **how))[1])
    with serving(folder) as running:
        yield running


def _asking(server: Served, new: int, **more: Any) -> socket.socket:
    """A connection with a request for so many tokens of four choices, each token about 700 bytes of the answer."""
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    made.settimeout(60)
    made.connect((server.host, server.port))
    fields = {"prompt": "a", "max_tokens": new, "n": CHOICES, "logprobs": 20, "seed": 1, "ignore_eos": True, **more}
    body = json.dumps(fields)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}"
    made.sendall(f"{head}\r\n\r\n{body}".encode())
    return made


def _number(server: Served, name: str) -> float:
    lines = server.send("/metrics")[1].splitlines()
    return next((float(line.split()[1]) for line in lines if line.startswith(f"fnmodels_{name} ")), 0.0)


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def _rest(made: socket.socket) -> bytes:
    """What can still be read, up to the end or a reset."""
    found = b""
    try:
        while part := made.recv(1 << 16):
            found += part
    except ConnectionResetError:
        pass
    return found


def test_a_stream_that_is_not_read_ends_with_its_request(server: Served) -> None:
    with _asking(server, 240, stream=True) as made:
        _until(lambda: _number(server, "running") == CHOICES)
        status, answer, _ = server.send("/v1/completions", {"prompt": "a", "max_tokens": 3, "ignore_eos": True})
        assert status == 200 and answer["usage"]["completion_tokens"] == 3
        assert _number(server, "running") == CHOICES  # still: the others were not held up
        _until(lambda: _number(server, "running") == 0)
        assert _number(server, "cancelled_total") == CHOICES
        assert b"[DONE]" not in _rest(made)


def test_an_answer_that_is_complete_and_not_read_ends(server: Served) -> None:
    with _asking(server, 100) as made:
        _until(lambda: _number(server, "request_seconds_count") == 1)
        time.sleep(3 * UNREAD)
        head, _, body = _rest(made).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200") or not head
        assert b'"usage"' not in body  # the end of it


def test_a_client_that_reads_slowly_has_all_of_its_stream(server: Served) -> None:
    with _asking(server, 160, stream=True) as made:
        end, found = time.monotonic() + 4 * UNREAD, b""
        while time.monotonic() < end:
            found += made.recv(2048)
            time.sleep(0.05)
        assert b"[DONE]" not in found  # most of it was not read in that time
        assert (found + _rest(made)).rstrip().endswith(b"data: [DONE]\n\n\r\n0")
        assert _number(server, "cancelled_total") == 0

"""A process of the server that is stopped: what becomes of requests that run and of those that wait."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import Served, write_checkpoint

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

TEXT = "/v1/completions"
# The command, with a step that takes 50 ms, so that requests are under way for a while.
SLOW = """
import sys, time
from train.generation.batching import ContinuousBatch
draw = ContinuousBatch.draw
def slowly(self, **options):
    time.sleep(0.05)
    return draw(self, **options)
ContinuousBatch.draw = slowly
from train.server.command import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("stopped") / "checkpoint")


class Process:
    """A server in a process of its own, and the answers to requests that are sent from threads."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self.process, self.served = process, Served(None, "127.0.0.1", port)
        self.answers: dict[str, Any] = {}
        self.seconds: dict[str, float] = {}
        self._threads = list[threading.Thread]()

    def ask(self, name: str, **body: Any) -> None:
        """Sends a request; its answer, and when it came, stand under the name."""

        def asked() -> None:
            self.answers[name] = self.served.send(TEXT, {"prompt": "a", "ignore_eos": True} | body)
            self.seconds[name] = time.monotonic()

        self._threads.append(threading.Thread(target=asked))
        self._threads[-1].start()

    def until(self, **gauges: int) -> None:
        """Waits for values of gauges."""
        end = time.monotonic() + 60
        while True:
            text = self.served.send("/metrics")[1]
            if all(f"fnmodels_{name} {value}\n" in text for name, value in gauges.items()):
                return
            assert time.monotonic() < end, text
            time.sleep(0.02)

    def stop(self, sent: signal.Signals) -> tuple[float, str]:
        """(the time of the signal, standard error), once the process has ended by the signal and all is answered."""
        begin = time.monotonic()
        self.process.send_signal(sent)
        _, errors = self.process.communicate(timeout=110)
        for thread in self._threads:
            thread.join()
        assert self.process.returncode == (130 if sent == signal.SIGINT else -sent), errors
        return begin, errors


@contextmanager
def started(folder: Path, *flags: str) -> Iterator[Process]:
    command = [sys.executable, "-c", SLOW, str(folder), "--port", "0", "--name", "own", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.fullmatch(r"own answers at http://127.0.0.1:(\d+)/v1\n", process.stdout.readline())
            assert found is not None
            yield Process(process, int(found[1]))
        finally:
            process.kill()


def _is_stopping(answer: tuple[int, Any, dict[str, str]]) -> bool:
    status, content, headers = answer
    return status == 503 and content["error"]["code"] == 503 and int(headers["retry-after"]) >= 1


@pytest.mark.slow
def test_requests_that_outlast_the_grace_get_503_or_an_error_event(folder: Path) -> None:
    with started(folder, "--grace", "2", "--slots", "2") as server:
        server.ask("runs", max_tokens=480)
        server.ask("streamed", max_tokens=480, stream=True)
        server.until(running=2)
        server.ask("waits", max_tokens=480)
        server.ask("waits, streamed", max_tokens=480, stream=True)
        server.until(running=2, queue=2)
        begin, errors = server.stop(signal.SIGINT)
    assert _is_stopping(server.answers["runs"]) and _is_stopping(server.answers["waits"])
    for name in ("streamed", "waits, streamed"):
        status, content, _ = server.answers[name]
        *pieces, last, done = [line.removeprefix("data: ") for line in content.split("\n\n") if line]
        assert status == 200 and done == "[DONE]" and json.loads(last)["error"]["code"] == 503
        assert bool(pieces) == (name == "streamed") and all("choices" in json.loads(piece) for piece in pieces)
    ends = {name: seconds - begin for name, seconds in server.seconds.items()}
    assert max(ends["waits"], ends["waits, streamed"]) < min(ends["runs"], ends["streamed"])
    assert min(ends["runs"], ends["streamed"]) > 1.9  # the grace
    assert len(errors.splitlines()) <= 3, errors


@pytest.mark.slow
def test_requests_that_run_are_answered_within_the_grace_and_others_at_once(folder: Path) -> None:
    with started(folder, "--grace", "100", "--slots", "2") as server:
        server.ask("runs", max_tokens=120)
        server.ask("streamed", max_tokens=120, stream=True)
        server.until(running=2)
        server.ask("waits", max_tokens=10)
        server.until(running=2, queue=1)
        _, errors = server.stop(signal.SIGTERM)
    assert _is_stopping(server.answers["waits"])
    assert server.answers["runs"][0] == 200 and server.answers["runs"][1]["usage"]["completion_tokens"] == 120
    assert server.seconds["waits"] < min(server.seconds["runs"], server.seconds["streamed"])
    pieces = server.answers["streamed"][1].split("\n\n")
    assert pieces[-2:] == ["data: [DONE]", ""] and '"finish_reason": "length"' in pieces[-3]
    assert len(errors.splitlines()) <= 1, errors


@pytest.mark.slow
def test_a_body_that_does_not_arrive_is_answered_when_the_grace_is_over(folder: Path) -> None:
    with started(folder, "--grace", "0") as server:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n"
        with socket.create_connection(("127.0.0.1", server.served.port), 60) as connection:
            connection.sendall(head.encode() + b"{")
            time.sleep(0.3)
            _, errors = server.stop(signal.SIGTERM)
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 503 ")
    assert len(errors.splitlines()) <= 3, errors

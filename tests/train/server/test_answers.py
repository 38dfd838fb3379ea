"""What of an answer is ready at a time: pieces are joined where the server's thread is later than the worker's."""

import asyncio
from typing import Any

import pytest

from train.generation.requests import Event, Request

pytest.importorskip("starlette")


class _Worker:
    def __init__(self) -> None:
        self.tickets: list[Any] = []
        self.cancelled = 0

    def submit(self, model: Any, tickets: Any) -> None:
        self.tickets += tickets

    def cancel(self, tickets: Any) -> None:
        self.cancelled += 1


def _call(worker: Any, *, stream: bool, nats: int | None = None, echo: bool = False) -> Any:
    from types import SimpleNamespace

    from train.server.answers import Asked, Call
    from train.server.metrics import Metrics
    from train.server.model import Prompt

    requests = [Request([1], 3, draw=draw) for draw in range(2)]
    asked = Asked([Prompt([1], "<")], requests, 2, nats, echo, stream, False)
    model: Any = SimpleNamespace(served=None)
    return Call(worker, model, asked, Metrics())


async def _all(call: Any) -> list[dict[int, Any]]:
    return [ready async for ready in call.pieces()]


def _event(token: int, reason: str | None = None) -> Event:
    return Event(0, token, -float(token), 0.0, f"t{token}", reason)


def test_what_came_while_nobody_looked_is_one_piece_of_each_choice() -> None:
    async def run() -> Any:
        worker = _Worker()
        call = _call(worker, stream=True, nats=0)
        reading = asyncio.create_task(_all(call))
        await asyncio.sleep(0)
        first, second = worker.tickets
        first.put(_event(1))
        first.put(_event(2))
        second.put(_event(3, "max_new"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        first.put(_event(4, "stop_id"))
        return await reading, call.generated, worker.cancelled

    found, generated, cancelled = asyncio.run(run())
    told = [{i: (one.text, [t.token for t in one.tokens], one.reason) for i, one in ready.items()} for ready in found]
    assert told == [{0: ("t1t2", [1, 2], None), 1: ("t3", [3], "length")}, {0: ("t4", [4], "stop")}]
    assert generated == 4 and cancelled == 1


def test_what_came_in_front_of_an_error_is_sent() -> None:
    from train.server.errors import ApiError

    async def run() -> list[Any]:
        worker = _Worker()
        call, found = _call(worker, stream=True), list[Any]()
        worker.tickets[0].put(_event(1))
        worker.tickets[1].put(RuntimeError("broken"))
        worker.tickets[0].put(_event(2))

        async def read() -> None:
            async for ready in call.pieces():
                found.append({i: (one.text, one.tokens) for i, one in ready.items()})

        with pytest.raises(ApiError, match="The model could not answer: RuntimeError: broken"):
            await read()
        return found

    assert asyncio.run(run()) == [{0: ("t1", [])}]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_left_gets_nothing_of_what_is_ready(stream: bool) -> None:
    from train.server.answers import ClientLeftError

    async def run() -> None:
        worker = _Worker()
        call = _call(worker, stream=stream)
        worker.tickets[0].put(_event(1, "max_new"))
        call.left()
        with pytest.raises(ClientLeftError):
            await _all(call)

    asyncio.run(run())


def test_an_answer_at_once_wakes_up_at_the_end_of_each_choice() -> None:
    async def run() -> Any:
        worker = _Worker()
        call = _call(worker, stream=False, echo=True)
        reading = asyncio.create_task(_all(call))
        for ticket in worker.tickets:
            ticket.put(_event(1))
            ticket.put(_event(2, "max_new"))
        return await reading

    found = asyncio.run(run())
    assert [{i: one.text for i, one in ready.items()} for ready in found] == [
        {0: "<", 1: "<"},
        {0: "t1t2", 1: "t1t2"},
    ]

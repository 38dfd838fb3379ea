"""The load run of server.py: clients of which some leave, send too much, or send what is no request."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from server_clients import CHUNKED, Asked, Connection, LostError, Reply, Said, said

RIGHT, LEFT = "200, right", "left"
PAUSE = 0.2  # seconds before the next request behind a 429, less than its Retry-After: the queue stays full


@dataclass
class Load:
    """Clients that ask again and again, and what became of each request.

    Args:
        port: Of the server.
        pool: The requests.
        alone: The answer to each of them alone.
        body_limit: Bytes of a body at most, as the server was told.
        found: How often each (kind of client, outcome) occurred.
        wrong: Outcomes that must not be, with what is wrong, the first few.
    """

    port: int
    pool: list[Asked]
    alone: list[Said]
    body_limit: int
    found: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def run(self, clients: int, seconds: float) -> None:
        """Asks for so long; requests that are under way then are answered."""
        end = time.monotonic() + seconds
        await asyncio.gather(*(self._client(number, end) for number in range(clients)))

    async def _client(self, number: int, end: float) -> None:
        draw, kinds = random.Random(number), list(KINDS)
        kind = kinds[number % len(kinds)]  # so that each occurs in a short run
        while time.monotonic() < end:
            try:
                outcome = await KINDS[kind].ask(self, draw)
            except (LostError, OSError) as error:
                outcome = f"LOST: {type(error).__name__}"
                self._note(f"{kind}: {error}")
            if outcome not in KINDS[kind].allowed:
                self._note(f"{kind}: {outcome}")
            self.found[kind, outcome] += 1
            if outcome == "429":
                await asyncio.sleep(PAUSE)
            (kind,) = draw.choices(kinds, [kind.weight for kind in KINDS.values()])

    def _note(self, sentence: str) -> None:
        if len(self.wrong) < 20:
            self.wrong.append(sentence)

    async def _asked(self, draw: random.Random, *, stream: bool) -> str:
        number = draw.randrange(len(self.pool))
        connection = await Connection.open(self.port)
        try:
            connection.send(self.pool[number].body(stream=stream, logprobs=0))
            reply = await connection.reply()
        finally:
            connection.close()
        if reply.status != 200:
            return _refused(reply)
        answer, wanted = said(reply.body, stream=stream), self.alone[number]
        if answer != wanted:
            self._note(f"request {number} is answered by {answer}, alone by {wanted}")
        return RIGHT if answer == wanted else "200, WRONG"

    async def at_once(self, draw: random.Random) -> str:
        return await self._asked(draw, stream=False)

    async def streamed(self, draw: random.Random) -> str:
        return await self._asked(draw, stream=True)

    async def leaves_early(self, draw: random.Random) -> str:
        """Behind its request, or within it."""
        connection, body = await Connection.open(self.port), draw.choice(self.pool).body()
        connection.send(body[: draw.randrange(len(body) + 1)], length=len(body))
        await asyncio.sleep(draw.choice((0.0, 0.02, 0.5)))
        connection.kill(reset=draw.random() < 0.5)
        return LEFT

    async def leaves_a_stream(self, draw: random.Random) -> str:
        connection, events = await Connection.open(self.port), draw.randrange(8)
        connection.send(draw.choice(self.pool).body(stream=True))
        status, headers = await connection.head()
        if status == 200:
            async for _ in connection.pieces(headers):
                events -= 1
                if events < 0:
                    break
        connection.kill(reset=draw.random() < 0.5)
        return LEFT if status == 200 else str(status)

    async def oversized(self, draw: random.Random) -> str:
        """All of a body that is too large by a little or by much, with its length in front or without."""
        size = draw.choice((self.body_limit + 1, 4 * self.body_limit, 64 * self.body_limit))
        length, last = draw.choice((None, CHUNKED)), draw.random() < 0.5
        return await self._sent(b'{"prompt": "' + b"a" * size + b'"}', length=length, last=last)

    async def malformed(self, draw: random.Random) -> str:
        body = draw.choice(self.pool).body()
        wrong = (b"", b"{", b"[]", b"\xff" * 100, b"[" * 10_000, body[:-1], body.replace(b'"prompt"', b'"prompts"'))
        fields = (b"[-1]", b'"w300", "max_tokens": 1000000', b'"w300", "temperature": 1e400', b'"\\ud800"')
        return await self._sent(draw.choice((*wrong, *(b'{"prompt": ' + one + b"}" for one in fields))))

    async def no_http(self, draw: random.Random) -> str:
        connection = await Connection.open(self.port)
        connection.writer.write(draw.choice((b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"POST\r\n\r\n", b"a" * 100_000)))
        reply = await connection.reply()
        connection.close()
        return str(reply.status)

    async def _sent(self, body: bytes, *, length: int | None = None, last: bool = False) -> str:
        connection = await Connection.open(self.port)
        try:
            connection.send(body, length=length, last=last)
            await connection.writer.drain()  # as clients do that read when they have sent all
            return _refused(await connection.reply())
        finally:
            connection.close()


def _refused(reply: Reply) -> str:
    """The status; with what is missing where it is not clear."""
    clear = reply.error() and (reply.status != 429 or int(reply.headers.get("retry-after", 0)) > 0)
    return f"{reply.status}{'' if clear else ', NOT CLEAR'}"


@dataclass(frozen=True)
class Kind:
    """Clients of one kind. allowed: what may become of their requests; weight: of how many of them."""

    ask: Callable[[Load, random.Random], Awaitable[str]]
    allowed: tuple[str, ...]
    weight: int


KINDS = {
    "wait for answers": Kind(Load.at_once, (RIGHT, "429"), 6),
    "read streams": Kind(Load.streamed, (RIGHT, "429"), 6),
    "leave early": Kind(Load.leaves_early, (LEFT,), 2),
    "leave within a stream": Kind(Load.leaves_a_stream, (LEFT, "429"), 2),
    "send oversized bodies": Kind(Load.oversized, ("413",), 1),
    "send malformed bodies": Kind(Load.malformed, ("400", "429"), 2),  # the queue is looked at before the prompt
    "send no HTTP": Kind(Load.no_http, ("400",), 1),
}

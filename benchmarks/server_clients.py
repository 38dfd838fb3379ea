"""The clients of server.py: HTTP/1.1 over asyncio's streams. The standard library alone, so that they cost little."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

PATH = "/v1/completions"
CHUNKED = -1  # as the length of a body: its head says none
PATIENCE = 600.0  # seconds for an answer, after which it is lost
MEANS = 19.31, 58.45  # tokens of prompts and answers, as in dev/serve.py


class LostError(Exception):
    """A connection ended without a complete answer."""


@dataclass(frozen=True)
class Asked:
    """A request. new: tokens of its answer; seed: of a drawn answer, None for a greedy one."""

    prompt: list[int]
    new: int
    seed: int | None

    def body(self, **more: Any) -> bytes:
        how: dict[str, Any] = {"temperature": 0} if self.seed is None else {"seed": self.seed}
        fields = {"prompt": self.prompt, "max_tokens": self.new, "ignore_eos": True, **how, **more}
        return json.dumps(fields).encode()


@dataclass(frozen=True)
class Said:
    """An answer: its text, the log-probability of each token (none unless asked for), and why it ended."""

    text: str
    logp: tuple[float, ...]
    reason: str | None


@dataclass(frozen=True)
class Reply:
    """What a server answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    def error(self) -> str:
        """The sentence of an error in OpenAI's form; "" where there is none."""
        try:
            return str(json.loads(self.body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            return ""


def drawn(count: int, vocab: int, *, most: int = 6, greedy: bool = True) -> list[Asked]:
    """Requests of exponential lengths, cut off at `most` times the mean; greedy: False draws every other answer."""
    draw, found = random.Random(0), []
    for i in range(count):
        size, new = (int(min(max(draw.expovariate(1 / mean), 2), most * mean)) for mean in MEANS)
        prompt = [draw.randrange(1, vocab) for _ in range(size)]
        found.append(Asked(prompt, new, None if greedy or i % 2 else i))
    return found


class Connection:
    """A connection to the server of this machine, for one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Connection:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    def send(
        self, data: bytes, *, path: str = PATH, method: str = "POST", length: int | None = None, last: bool = False
    ) -> None:
        """Sends a request. length: of its body as its head says, None for the truth; last: the connection ends then."""
        framing = "Transfer-Encoding: chunked" if length == CHUNKED else f"Content-Length: {length or len(data)}"
        lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", framing, *["Connection: close"] * last, "", ""]
        self.writer.write("\r\n".join(lines).encode())
        self.writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if length == CHUNKED else data)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of an answer."""
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = (line.partition(":") for line in lines[1:] if line)
        return int(lines[0].split()[1]), {name.lower(): value.strip() for name, _, value in fields}

    async def pieces(self, headers: dict[str, str]) -> AsyncIterator[bytes]:
        """The body, as it comes."""
        if headers.get("transfer-encoding") == "chunked":
            while size := int(await self._reader.readline() or b"-", 16):
                yield (await self._reader.readexactly(size + 2))[:-2]
            await self._reader.readline()
        elif "content-length" in headers:
            yield await self._reader.readexactly(int(headers["content-length"]))
        else:
            yield await self._reader.read()

    async def reply(self) -> Reply:
        """The answer. LostError where it does not come to its end."""
        try:
            async with asyncio.timeout(PATIENCE):
                status, headers = await self.head()
                return Reply(status, headers, b"".join([piece async for piece in self.pieces(headers)]))
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            raise LostError(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        self.writer.close()

    def kill(self, *, reset: bool) -> None:
        """Ends as the connections of a killed process do, or with a reset."""
        if reset:
            made = self.writer.get_extra_info("socket")
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def said(body: bytes, *, stream: bool) -> Said:
    """An answer's only choice. LostError for a stream without an end, or with an error."""
    if not stream:
        return _joined(json.loads(body)["choices"])
    *events, done, rest = body.decode().split("\n\n")
    objects = [json.loads(event.removeprefix("data: ")) for event in events]
    if done != "data: [DONE]" or rest or any("error" in one for one in objects):
        raise LostError(f"a stream ends with {events[-1:]}, {done!r} and {rest!r}")
    return _joined([choice for one in objects for choice in one["choices"]])


def _joined(choices: list[dict[str, Any]]) -> Said:
    nats = [value for choice in choices if choice["logprobs"] for value in choice["logprobs"]["token_logprobs"]]
    return Said("".join(choice["text"] for choice in choices), tuple(nats), choices[-1]["finish_reason"])


async def answered(port: int, requests: list[Asked], clients: int, *, stream: bool) -> list[Said]:
    """The answers to all requests in their order; each client asks for the next one over the same connection."""
    rest, found = iter(enumerate(requests)), dict[int, bytes]()

    async def one() -> None:
        connection = await Connection.open(port)
        for i, asked in rest:
            connection.send(asked.body(stream=stream))
            reply = await connection.reply()
            if reply.status != 200:
                raise LostError(f"status {reply.status}: {reply.error()}")
            found[i] = reply.body
        connection.close()

    await asyncio.gather(*(one() for _ in range(clients)))
    return [said(found[i], stream=stream) for i in range(len(requests))]


async def fetched(port: int, path: str) -> Reply:
    """The answer to a GET."""
    connection = await Connection.open(port)
    connection.send(b"", method="GET", path=path)
    try:
        return await connection.reply()
    finally:
        connection.close()

"""The clients of server.py: URL CLIENTS SECONDS VOCABULARY; what became of their requests is printed.

The standard library alone, so that the process starts at once. One request in ten is left after its first byte.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator


def drawn(seed: int, vocab: int) -> Iterator[tuple[list[int], int]]:
    """Endless prompts and the tokens wanted of each answer, of exponential lengths as in serve.py."""
    draw = random.Random(seed)
    while True:
        size, new = (int(min(max(draw.expovariate(1 / mean), 2), 6 * mean)) for mean in (19.31, 58.45))
        yield [draw.randrange(1, min(vocab, 256)) for _ in range(size)], new


async def ask(url: str, clients: int, seconds: float, vocab: int) -> Counter[str]:
    """What becomes of the requests of all clients until the time is over."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    found, end = Counter[str](), time.monotonic() + seconds

    async def one(number: int) -> None:
        for count, (prompt, new) in enumerate(drawn(number, vocab)):
            if time.monotonic() > end:
                return
            body = {"prompt": prompt, "max_tokens": new, "ignore_eos": True, "stream": (number + count) % 2 == 0}
            data = json.dumps(body).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            try:
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
                if (number + count) % 10 == 0:
                    await asyncio.wait({asyncio.ensure_future(reader.read(1))}, timeout=2)
                    found["left"] += 1
                else:
                    answer = await reader.read()
                    right = b"[DONE]" in answer if body["stream"] else f'"completion_tokens":{new}'.encode() in answer
                    found[answer.split(b" ", 2)[1].decode() + ("" if right else " cut")] += 1
                writer.close()
            except (OSError, IndexError) as error:
                found[type(error).__name__] += 1

    await asyncio.gather(*(one(number) for number in range(clients)))
    return found


if __name__ == "__main__":
    where, clients, seconds, vocab = sys.argv[1:]
    print(json.dumps(asyncio.run(ask(where, int(clients), float(seconds), int(vocab)))))

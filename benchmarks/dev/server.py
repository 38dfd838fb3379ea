"""Load on the server: many clients at once, some of which leave, beside `train.serve` of the same requests.

    python benchmarks/dev/server.py             200 clients for 60 seconds, the 26M Llama of train_step.py, 32 slots
    python benchmarks/dev/server.py --quick     a tiny model for a few seconds, to check that everything runs

Clients are another process (server_clients.py). One request in ten is left after its first byte. Prompts and answers
have exponential lengths (means 19 and 58 tokens, as in serve.py), and every other request is streamed. Tokens are
counted by the server's own metrics, those of requests that were left included, and both ways draw for the same time.
Processor time per token is that of this process, the server's, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import above  # noqa: F401
import psutil
from generate import QUICK, SIZES, configs
from server_clients import drawn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import params as P
import train
from train.generation.requests import Request
from train.server.app import Limits
from train.server.background import background
from train.server.listening import SWITCH

CONTEXT = 512


@dataclass(frozen=True)
class Rate:
    """Tokens drawn, seconds, and seconds of the processor."""

    tokens: float
    seconds: float
    processor: float

    def __str__(self) -> str:
        each = 1e6 * self.processor / self.tokens
        return f"{self.tokens / self.seconds:8.1f} tokens/s, {each:8.1f} us of the processor each"


def without_http(params: Any, config: Any, tokenizer: Tokenizer, slots: int, seconds: float, seed: int) -> Rate:
    """Of `train.serve` with a queue that never ends."""
    asked = (
        Request(prompt, new, train.Sampling(), seed=i) for i, (prompt, new) in enumerate(drawn(seed, config.vocab_size))
    )
    events = train.serve(params, config, asked, slots=slots, capacity=CONTEXT, tokenizer=tokenizer, compile="none")
    next(events)
    begin, processor, tokens = time.perf_counter(), time.process_time(), 0
    for _ in events:
        tokens += 1
        if time.perf_counter() - begin > seconds:
            break
    return Rate(tokens, time.perf_counter() - begin, time.process_time() - processor)


def over_http(server: Any, arguments: tuple[int, int], seconds: float) -> tuple[Rate, dict[str, int]]:
    """Of the server with all clients, after a second in which they begin, and what became of their requests."""

    def tokens() -> float:
        lines = server.service.metrics.text().splitlines()
        return float(next((line.split()[1] for line in lines if line.startswith("fnmodels_generated_tokens_total")), 0))

    clients, vocab = arguments
    command = [sys.executable, str(Path(__file__).with_name("server_clients.py")), server.url]
    command += [str(clients), str(seconds + 2), str(vocab)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
        while not tokens():
            time.sleep(0.05)
        time.sleep(1)
        begin, processor, before = time.perf_counter(), time.process_time(), tokens()
        time.sleep(seconds)
        rate = Rate(tokens() - before, time.perf_counter() - begin, time.process_time() - processor)
        found: dict[str, int] = json.loads(asking.communicate()[0])
    return rate, found


def tokenizer_of(vocab: int) -> Tokenizer:
    """A token for each byte, and words for the rest of the vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab]
    words = {**{letter: i for i, letter in enumerate(letters)}, **{f"w{i}": i for i in range(256, vocab)}}
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--quick", action="store_true")
    flags.add_argument("--clients", type=int, default=200)
    flags.add_argument("--seconds", type=float, default=60)
    flags.add_argument("--slots", type=int, default=32)
    given = flags.parse_args()
    sizes = QUICK if given.quick else SIZES
    config = configs(sizes, CONTEXT)[1]
    seconds = min(given.seconds, 3) if given.quick else given.seconds
    params, tokenizer = P.init(config, seed=0), tokenizer_of(config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        P.save_pretrained(Path(folder), config, params)
        tokenizer.save(str(Path(folder) / "tokenizer.json"))
        limits = Limits(slots=given.slots, context=CONTEXT)
        print("without HTTP", without_http(params, config, tokenizer, given.slots, seconds / 2, 1), flush=True)
        with background(Path(folder), "own", limits=limits) as server:
            process, arguments = psutil.Process(), (given.clients, config.vocab_size)
            sys.setswitchinterval(SWITCH)  # as the command does
            over_http(server, arguments, min(seconds, 5))  # buffers grow to their sizes
            before = process.memory_info().rss
            rate, found = over_http(server, arguments, seconds)
            grown = (process.memory_info().rss - before) / 2**20
            print("over HTTP   ", rate, found, f"memory grew by {grown:.1f} MiB")
        plain = without_http(params, config, tokenizer, given.slots, seconds / 2, 2)
        print("without HTTP", plain)
        share = rate.tokens / rate.seconds / (plain.tokens / plain.seconds)
        work = plain.processor / plain.tokens / (rate.processor / rate.tokens)
        print(f"over HTTP: {share:.2f} of the tokens per second, {work:.2f} by the processor's time")


if __name__ == "__main__":
    main()

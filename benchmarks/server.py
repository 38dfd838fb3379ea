"""Times the server beside `train.serve` without HTTP, and counts what becomes of requests under load.

    python benchmarks/server.py                     both parts, 32 slots
    python benchmarks/server.py --part load --seconds 600 --clients 400
    python benchmarks/server.py --quick             a tiny model for seconds, to check that everything runs

throughput   the same greedy requests of exponential lengths (means 19 and 58 tokens) to `train.serve` in this process
             and to the server in another one, answered at once or streamed, with the 26M Llama of train_step.py. The
             clients are this process. Contenders take turns; ratios are of medians, by wall time and by the processor
             time of who draws the tokens. Answers must be the same but for ties.
load         clients for some seconds, of which some leave, or send bodies that are too large or malformed, to a server
             of a 5M Llama with kernel="invariant" and a queue that is too short. Each answer must have the text and, to
             the bit, the log-probabilities of the same request alone in this process, or be refused with a clear
             status, and nothing be left at the end. The same load for as long comes first, in which slots and buffers
             grow to their sizes. Memory must then be flat from the first quarter of the load that is counted on.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil
import torch
from server_clients import Asked, Said, answered, drawn, fetched
from server_load import KINDS, Load
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import params as P
import train
from fnmodels import llama
from train.generation.requests import Request
from train.server.model import load
from train.server.worker import Served

CONTEXT = 512
TIMED = llama.Config(8192, 512, 1536, 6, 8, 4, max_position_embeddings=CONTEXT)  # 26M, that of train_step.py
LOADED = llama.Config(4096, 256, 768, 4, 8, 4, max_position_embeddings=CONTEXT)  # 5M, for many requests a second
QUICK = llama.Config(300, 64, 96, 2, 4, 2, max_position_embeddings=CONTEXT)
TARGET = 0.9  # of the tokens per second of `train.serve`
SAME = 0.97  # of the answers at least: sums of other batches differ in their last bits, and ties are broken by them
GROWTH = 0.05  # of memory behind the first quarter of the load that is counted, at most
QUARTERS = 4
BODY = 1 << 17  # bytes at most, in the load run


@dataclass(frozen=True)
class Server:
    """A server in a process of its own."""

    process: Any
    port: int
    log: IO[str]

    @property
    def seconds(self) -> float:
        """Processor time so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)

    @property
    def resident(self) -> float:
        """MiB of memory."""
        return float(psutil.Process(self.process.pid).memory_info().rss / 2**20)

    @property
    def held(self) -> tuple[int, int]:
        """(open files and sockets, threads)."""
        process = psutil.Process(self.process.pid)
        return process.num_fds(), process.num_threads()

    def gauges(self) -> dict[str, float]:
        """The numbers on the page of metrics."""
        text = asyncio.run(fetched(self.port, "/metrics")).body.decode()
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def complaints(self) -> list[str]:
        """Its lines on standard error, without the warnings of invalid HTTP requests."""
        return [line.rstrip() for line in self.log if "Invalid HTTP request received" not in line]

    def stop(self) -> int | None:
        """Its exit code behind SIGTERM; None where it goes on for a minute."""
        self.process.terminate()
        self.process.join(60)
        code: int | None = self.process.exitcode
        return code


def _serve(flags: list[str], threads: int, output: Any, log: str) -> None:
    """The command, in the process that this runs in."""
    from train.server.command import main

    os.dup2(output.fileno(), 1)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    torch.set_num_threads(threads)
    sys.exit(main(flags))


@contextmanager
def serving(folder: Path, threads: int, *flags: str) -> Iterator[Server]:
    """A server of the folder's model. BENCHMARK_START in the environment is how processes start, see `ranks`."""
    context: Any = multiprocessing.get_context(os.environ.get("BENCHMARK_START", "spawn"))
    reader, writer = context.Pipe(duplex=False)
    words = [str(folder), "--port", "0", "--context", str(CONTEXT), *flags]
    with tempfile.NamedTemporaryFile("r") as log:
        process = context.Process(target=_serve, args=(words, threads, writer, log.name))
        process.start()
        writer.close()
        try:
            line = os.read(reader.fileno(), 1000).decode()  # "NAME answers at http://127.0.0.1:PORT/v1"
            assert line, f"the server did not start: {log.read()}"
            yield Server(process, int(line.strip().removesuffix("/v1").rpartition(":")[2]), log)
        finally:
            process.kill()
            process.join()


def tokenizer_of(vocab: int) -> Tokenizer:
    """A token for each byte, and words for the rest of the vocabulary."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:vocab]
    words = {**{letter: i for i, letter in enumerate(letters)}, **{f"w{i}": i for i in range(256, vocab)}}
    made = Tokenizer(models.BPE(words, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


@contextmanager
def checkpoint(config: Any) -> Iterator[tuple[Path, Served]]:
    """A folder with a model that is drawn, and what a server reads in it."""
    with tempfile.TemporaryDirectory() as place:
        P.save_pretrained(Path(place), config, P.init(config, seed=0))
        tokenizer_of(config.vocab_size).save(str(Path(place) / "tokenizer.json"))
        yield Path(place), load(Path(place)).served


def in_process(model: Served, asked: list[Asked], slots: int, **how: Any) -> list[Said]:
    """The answers of `train.serve`."""
    requests = (
        Request(one.prompt, one.new, train.Sampling(temperature=float(one.seed is not None)), seed=one.seed or 0)
        for one in asked
    )
    texts, logp, reasons = [""] * len(asked), [list[float]() for _ in asked], [""] * len(asked)
    options = {"slots": slots, "capacity": CONTEXT, "tokenizer": model.tokenizer, **how}
    for event in train.serve(model.params, model.config, requests, **options):
        texts[event.row] += event.text
        logp[event.row].append(event.logp)
        reasons[event.row] = "length" if event.reason == "max_new" else str(event.reason)
    return [Said(text, tuple(nats), reason) for text, nats, reason in zip(texts, logp, reasons, strict=True)]


@dataclass(frozen=True)
class Turn:
    """Seconds of a run: of wall time, of the processor of who draws tokens, and of the clients'."""

    wall: float
    drawing: float
    clients: float


def throughput(server: Server, model: Served, asked: list[Asked], slots: int, rounds: int) -> None:
    """Prints the table of both ways."""
    clients = min(len(asked), 4 * slots)
    contenders: dict[str, Callable[[], list[Said]]] = {
        "train.serve": lambda: in_process(model, asked, slots),
        "HTTP, at once": lambda: asyncio.run(answered(server.port, asked, clients, stream=False)),
        "HTTP, streamed": lambda: asyncio.run(answered(server.port, asked, clients, stream=True)),
    }
    answers = {name: run() for name, run in contenders.items()}  # which warms them up too
    for name, found in answers.items():
        same = 1 - differing(found, answers["train.serve"]) / len(asked)
        print(f"  {name}: {same:.1%} of the answers are those of train.serve", flush=True)
        if same < SAME:
            raise SystemExit(f"{name}: {same:.1%} of the answers are those of train.serve; it must be {SAME:.0%}.")
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for name, run in contenders.items():
            gc.collect()
            wall, own, its = time.perf_counter(), time.process_time(), server.seconds
            run()
            wall, own, its = time.perf_counter() - wall, time.process_time() - own, server.seconds - its
            turns[name].append(Turn(wall, own, 0) if name == "train.serve" else Turn(wall, its, own))
    report(turns, sum(one.new for one in asked))


def report(turns: dict[str, list[Turn]], tokens: int) -> None:
    """Prints medians and their ratios."""
    medians = {
        name: Turn(*(statistics.median(getattr(one, part) for one in each) for part in ("wall", "drawing", "clients")))
        for name, each in turns.items()
    }
    base = medians["train.serve"]
    print(f"\nThroughput of {tokens:,} tokens: target {TARGET} x train.serve\n")
    columns = ("tokens/s", "x train.serve", "tokens per CPU second", "x train.serve by CPU", "CPU of the clients")
    print(f"| contender | {' | '.join(columns)} |\n|---|---:|---:|---:|---:|---:|")
    for name, one in medians.items():
        wall = f"{tokens / one.wall:.0f} | {base.wall / one.wall:.2f}"
        drawing = f"{tokens / one.drawing:.0f} | {base.drawing / one.drawing:.2f}"
        print(f"| {name} | {wall} | {drawing} | {one.clients / one.wall:.0%} |", flush=True)


def under_load(server: Server, model: Served, pool: list[Asked], clients: int, seconds: float) -> list[str]:
    """Prints what became of all requests, memory over time and what is left; returns what is wrong."""
    alone = [in_process(model, [one], 1, kernel="invariant")[0] for one in pool]
    run, before = Load(server.port, pool, alone, BODY), server.resident
    first = asyncio.run(watched(server, run, clients, seconds))
    settled(server)
    run.found.clear()
    held, idle = server.held, server.resident
    memory = [idle, *asyncio.run(watched(server, run, clients, seconds))]
    left = settled(server)
    memory.append(server.resident)
    repeated = asyncio.run(answered(server.port, pool, 1, stream=False))
    told = server.gauges()
    print(f"\nLoad: {clients} clients for {seconds:g} s\n")
    print("| clients that | requests | outcomes |\n|---|---:|---|")
    for kind in KINDS:
        outcomes = {outcome: count for (name, outcome), count in sorted(run.found.items()) if name == kind}
        words = "; ".join(f"{outcome}: {count:,}" for outcome, count in outcomes.items())
        print(f"| {kind} | {sum(outcomes.values()):,} | {words} |")
    columns = ("", "idle", *(f"quarter {number}" for number in range(1, QUARTERS + 1)), "idle again")
    print("\nMemory in MiB, the largest of each quarter\n")
    print(f"| {' | '.join(columns)} |\n|---|{'---:|' * (len(columns) - 1)}")
    for name, sizes in (("the same load before", [before, *first, idle]), ("the load", memory)):
        print(f"| {name} | {' | '.join(f'{size:.1f}' for size in sizes)} |")
    print("\nLeft at the end\n\n| | before | after |\n|---|---:|---:|")
    after, code = server.held, server.stop()
    rows: dict[str, tuple[int, int | None]] = {
        "requests that wait or run": (0, int(left)),
        "files and sockets": (held[0], after[0]),
        "threads": (held[1], after[1]),
        "wrong answers alone": (0, differing(repeated, alone)),
        "exit code behind SIGTERM": (-signal.SIGTERM, code),
    }
    for name, (before, now) in rows.items():
        print(f"| {name} | {before} | {now} |")
    print(f"  the server drew {told['fnmodels_generated_tokens_total']:,.0f} tokens, ", end="")
    print(f"and ended {told.get('fnmodels_cancelled_total', 0):,.0f} running requests of clients that had left")
    wrong = run.wrong + [f"{name}: {now}, not {was}" for name, (was, now) in rows.items() if now is None or now > was]
    wrong += server.complaints()
    if max(memory[2:-1]) > (1 + GROWTH) * memory[1]:
        wrong.append(f"memory grew from {memory[1]:.1f} to {max(memory[2:-1]):.1f} MiB")
    return wrong


async def watched(server: Server, run: Load, clients: int, seconds: float) -> list[float]:
    """Runs the clients for so long; the most memory of the server in each quarter, looked at five times a second."""
    asking, found, begin = asyncio.create_task(run.run(clients, seconds)), [0.0] * QUARTERS, time.monotonic()
    while not asking.done():
        quarter = int(QUARTERS * (time.monotonic() - begin) / seconds)
        found[min(quarter, QUARTERS - 1)] = max(found[min(quarter, QUARTERS - 1)], server.resident)
        await asyncio.wait([asking], timeout=min(0.2, seconds / 20))
    await asking
    return found


def differing(found: list[Said], wanted: list[Said]) -> int:
    """How many texts differ."""
    return sum(a.text != b.text for a, b in zip(found, wanted, strict=True))


def settled(server: Server) -> float:
    """Requests that wait or run, once there are none or half a minute is over."""
    end = time.monotonic() + 30
    while True:
        told = server.gauges()
        left = told["fnmodels_queue"] + told["fnmodels_running"]
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("throughput", "load"), nargs="+", default=["throughput", "load"])
    parser.add_argument("--threads", type=int, default=1, help="of the model (default 1: another core is the clients')")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=256, help="of a round (default 256)")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--clients", type=int, default=200, help="of the load run (default 200)")
    parser.add_argument("--seconds", type=float, default=60, help="of the load run (default 60)")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    timed, loaded, pool, most = TIMED, LOADED, 24, 3
    if given.quick:
        timed, loaded, pool, most = QUICK, QUICK, 6, 1
        given.rounds, given.requests, given.slots, given.clients, given.seconds = 1, 8, 4, 24, 1.0
    torch.set_num_threads(given.threads)
    wrong = list[str]()
    flags = ("--slots", str(given.slots))
    if "throughput" in given.part:
        with checkpoint(timed) as (folder, model), serving(folder, given.threads, *flags) as server:
            throughput(
                server,
                model,
                drawn(given.requests, timed.vocab_size, most=1 if given.quick else 6),
                given.slots,
                given.rounds,
            )
    if "load" in given.part:
        flags += ("--queue", str(given.slots), "--body-limit", str(BODY), "--kernel", "invariant")
        with checkpoint(loaded) as (folder, model), serving(folder, given.threads, *flags) as server:
            asked = drawn(pool, loaded.vocab_size, most=most, greedy=False)
            wrong = under_load(server, model, asked, given.clients, given.seconds)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()

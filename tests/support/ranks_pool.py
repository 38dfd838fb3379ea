"""A pool of rank processes for distributed tests: forked once per world size, with torch loaded, and reused.

    def sums(start: int) -> float:                       # at the top of a test module; all ranks run it
        x = torch.full((1,), start + float(dist.get_rank()))
        dist.all_reduce(x)
        return x.item()                                  # JSON

    def test_sums(ranks: Ranks) -> None:
        assert ranks(2)(sums, 3) == [7.0, 7.0]           # what each rank returned

A job that fails on one rank leaves others waiting, so the ranks of that world size are killed and forked again for the
next job; the message holds their exceptions. `devices` caches device meshes, whose process groups are slow to create.
After each step over a mesh, all copies of a leaf are compared (`copies`).
Imports of DTensor or dynamo are cheap in jobs: they are loaded before the fork. Between jobs ranks are stopped
(SIGSTOP), because each gloo process group has a thread that wakes a hundred times per second.

`python -m tests.support.ranks_pool` is the server: lines of JSON in and out. It forks, and never computes, for after a
fork torch's threads hang where the parent used them.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

# Making DTensors imports it, and would do so in each process anew.
import torch._dynamo

# Compiling imports these.
import torch._functorch.partitioners
import torch._inductor.scheduler
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

import params  # noqa: F401
import train  # noqa: F401
from tests.support import copies
from tests.support.cases import structures
from train.parallel import Mesh

ROOT = Path(__file__).parents[2]
# What modules with jobs import, transformers and TensorBoard among it, and those whose selections of variants take half
# a second: six seconds in each rank otherwise.
PRELOADED = ("tests.support.encoder_losses", "tests.support.sense_losses", "train.job.run", "torch.utils.tensorboard")
PRELOADED += ("tests.train.parallel.test_hybrids",)
FOLDER = "RANKS_FOLDER"  # in the environment of ranks: where those of a pool leave files for each other
GRACE = 1.0  # seconds for the other ranks after the first has failed
LIMIT = datetime.timedelta(seconds=60)  # timeout of a rank that waits for another
Ranks = Callable[[int], Callable[..., list[Any]]]


@functools.cache
def devices(mesh: Mesh) -> DeviceMesh:
    """For jobs: the device mesh of these sizes, created once per rank process."""
    return mesh.device_mesh()


@functools.cache
def _group_of(ranks: tuple[int, ...], backend: str | None) -> Any:
    return dist.new_group(ranks, backend=backend)


def shared_group(ranks: list[int], backend: str | None = None, **_: Any) -> Any:
    """In place of `new_group` for device meshes: one group for the dimensions of all meshes that have these ranks.

    Each gloo group has a thread that wakes a hundred times per second, and a mesh makes one for each of its dimensions.
    """
    return _group_of(tuple(ranks), backend)


# ------------------------------------------------------------------------------------------------ in the test


class Pool:
    """A server and its ranks. `ranks(4)(function, *JSON)` runs `function` in 4 of them: the list of their results."""

    def __init__(self) -> None:
        self.server: subprocess.Popen[str] | None = None
        self.errors: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the pool

    def ranks(self, world: int) -> Callable[..., list[Any]]:
        return functools.partial(self.run, world)

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        if self.server is None or self.server.poll() is not None:
            self.server = subprocess.Popen(
                [sys.executable, "-m", "tests.support.ranks_pool"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
        assert self.server.stdin and self.server.stdout
        job = {"function": [function.__module__, function.__qualname__], "args": args}
        self.server.stdin.write(json.dumps({"world": world, "timeout": timeout, "job": job}) + "\n")
        self.server.stdin.flush()
        line = self.server.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise RuntimeError(f"The server of ranks has ended:\n{self.errors.read()[-4000:]}")
        answer = json.loads(line)
        if answer["errors"]:
            raise AssertionError("\n".join(f"rank {rank}: {error}" for rank, error in answer["errors"].items()))
        return answer["results"]

    def close(self) -> None:
        if self.server is not None and self.server.stdin:
            self.server.stdin.close()
            self.server.wait(30)
        self.errors.close()


# ------------------------------------------------------------------------------------------------ in the server


@dataclass(frozen=True)
class Rank:
    """One process, with a pipe to it and one from it."""

    pid: int
    jobs: int
    answers: int


def serve() -> None:
    protocol = os.dup(1)
    os.dup2(2, 1)  # output of ranks must not mix with answers
    groups: dict[int, list[Rank]] = {}
    structures()  # imports all families and makes their configs, once and not in each rank
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # a rank that collected them would copy their pages
    os.fsync = os.fstat  # as in the tests' own process: see tests/conftest.py
    with tempfile.TemporaryDirectory() as place, os.fdopen(protocol, "w") as out:
        os.environ[FOLDER] = place
        for number, line in enumerate(sys.stdin):
            request = json.loads(line)
            world = request["world"]
            if world not in groups:
                groups[world] = fork(world, f"{place}/{number}", [rank for group in groups.values() for rank in group])
            results, errors = ask(groups[world], request["job"], request["timeout"])
            if errors:
                end(groups.pop(world))
            for rank in groups.get(world, []):
                os.kill(rank.pid, signal.SIGSTOP)
            out.write(json.dumps({"results": results, "errors": errors}) + "\n")
            out.flush()
        for group in groups.values():
            end(group)


def fork(world: int, store: str, others: list[Rank]) -> list[Rank]:
    group: list[Rank] = []
    for rank in range(world):
        jobs_out, jobs_in = os.pipe()
        answers_out, answers_in = os.pipe()
        pid = os.fork()
        if not pid:
            for other in (*others, *group):  # a pipe ends when all its writers are gone
                os.close(other.jobs)
                os.close(other.answers)
            os.close(jobs_in)
            os.close(answers_out)
            member(rank, world, store, jobs_out, answers_in)
        os.close(jobs_out)
        os.close(answers_in)
        group.append(Rank(pid, jobs_in, answers_out))
    return group


def ask(group: list[Rank], job: Any, timeout: float) -> tuple[list[Any], dict[int, str]]:
    """(results, {rank: traceback}); after the first failure the other ranks have little time left."""
    results: list[Any] = [None] * len(group)
    errors: dict[int, str] = {}
    for rank in group:
        os.kill(rank.pid, signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is read below
            os.write(rank.jobs, json.dumps(job).encode() + b"\n")
    waiting = {rank.answers: (number, b"") for number, rank in enumerate(group)}
    until = time.monotonic() + timeout
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], max(0.0, until - time.monotonic()))
        if not ready:
            hang = "no answer in time; it may wait for a rank that failed" if errors else f"no answer in {timeout:g} s"
            return results, errors | {number: hang for number, _ in waiting.values()}
        for pipe in ready:
            number, text = waiting[pipe]
            more = os.read(pipe, 1 << 16)
            text += more
            waiting[pipe] = number, text
            if more and not text.endswith(b"\n"):
                continue
            del waiting[pipe]
            answer = json.loads(text) if more else {"error": "it has ended without an answer"}
            if "error" in answer:
                errors[number] = answer["error"]
                until = min(until, time.monotonic() + GRACE)
            else:
                results[number] = answer["result"]
    return results, errors


def end(group: list[Rank]) -> None:
    for rank in group:
        os.close(rank.jobs)
        os.close(rank.answers)
        os.kill(rank.pid, signal.SIGKILL)
        os.waitpid(rank.pid, 0)


# ------------------------------------------------------------------------------------------------ in a rank


def member(rank: int, world: int, store: str, jobs: int, answers: int) -> None:
    """Runs jobs until the server is gone; never returns."""
    os.close(0)
    torch.set_num_threads(1)
    copies.watch()
    device_mesh.new_group = shared_group  # type: ignore[attr-defined]
    with os.fdopen(answers, "w") as out:
        for line in lines(jobs):
            try:
                if not dist.is_initialized():
                    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world, timeout=LIMIT)
                module, name = line["function"]
                answer = {"result": getattr(importlib.import_module(module), name)(*line["args"])}
                text = json.dumps(answer)
            except BaseException:
                text = json.dumps({"error": traceback.format_exc()})
            out.write(text + "\n")
            out.flush()
    os._exit(0)


def lines(pipe: int) -> Iterator[Any]:
    with os.fdopen(pipe) as given:
        yield from map(json.loads, given)


if __name__ == "__main__":
    serve()

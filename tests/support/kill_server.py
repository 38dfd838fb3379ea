"""A server that forks child processes to be killed by tests: `python -m tests.support.kill_server`.

It reads one JSON command per line, forks a child that runs it, answers with the child's process id and, after the child
has ended, its exit code. A kill thus costs a fork, and no start of Python or import of torch.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
from fnmodels import llama, tree
from fnmodels.tree import Tree
from tests.damage import cuts
from train import Saver, checkpoint
from train.cli import main
from train.job import report, run  # noqa: F401 - run: what `main` imports late is loaded once, before the forks
from train.job.settings import Settings

ROOT = Path(__file__).parents[2]
CONFIG = llama.Config(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
)
TINY = Settings(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    row_length=32,
    batch_rows=4,
    steps=48,
    eval_every=24,
    eval_rows=4,
    sample_tokens=6,
)


def state_of(step: int, size: int) -> Tree:
    """The state of step `step`, with values that no other step has."""
    generator = torch.Generator().manual_seed(step)
    matrices = [torch.randn(size, generator=generator) for _ in range(3)]
    return {"step": torch.tensor(step), "params": {"layers": matrices}}


def params_of(step: int) -> Tree:
    return tree.map(lambda leaf: leaf + step, P.init(CONFIG, 0))


def save_steps(folder: str, size: int) -> None:
    """Saves one step after the other, until killed."""
    for step in count(max(checkpoint.steps(folder), default=0) + 1):
        checkpoint.save(folder, step, state_of(step, size), {"seen": step}, keep=2)


def save_steps_in_a_thread(folder: str, size: int) -> None:
    with Saver(lambda state, step: checkpoint.save(folder, step, state, {"seen": step}, keep=2)) as saver:
        for step in count(max(checkpoint.steps(folder), default=0) + 1):
            saver.check()
            saver.save(state_of(step, size), step)


def save_models(folder: str, limits: list[str]) -> None:
    """Saves a model into the same folder until killed, with the shard sizes `limits` in turn."""
    for step in count(1):
        P.save_pretrained(folder, CONFIG, params_of(step), max_shard_size=limits[step % len(limits)])


def save_one_limited(folder: str, step: int, size: int, limit: int) -> None:
    """Saves one step with a file size limit of `limit` bytes. The error goes to standard error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    checkpoint.save(folder, step, state_of(step, size))


def save_model_limited(folder: str, step: int, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    P.save_pretrained(folder, CONFIG, params_of(step))


def run_job(flags: list[str]) -> None:
    pytest.MonkeyPatch().setattr(report, "draw_run", lambda path, *_, **__: path.touch())
    os._exit(main(flags, defaults=TINY))


def run_job_limited(flags: list[str], limit: int) -> None:
    """Runs the main job with a file size limit of `limit` bytes, which simulates a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    os._exit(main(flags, defaults=TINY))


def run_job_cut(flags: list[str], change: int) -> None:
    """Runs the main job, whose process ends before its change number `change` of the file system."""
    cuts.end_before(change, lambda: run_job(flags))


COMMANDS: dict[str, Callable[..., None]] = {
    command.__name__: command
    for command in (
        *(save_steps, save_steps_in_a_thread, save_models, save_one_limited, save_model_limited),
        *(run_job, run_job_limited, run_job_cut),
    )
}


def child(log: str, command: str, arguments: dict[str, Any]) -> None:
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes of a shell ignore SIGINT
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # delivers a signal that arrived meanwhile
        COMMANDS[command](**arguments)
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # to report it
        print(f"{type(error).__name__}: {error.strerror}", flush=True)
        os._exit(2)
    except BaseException:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def serve() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until a child can handle it
    print("ready", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        pid = os.fork()
        if not pid:
            child(**command)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


class KillServer:
    """The client for tests. log: receives the output of the children; cache: XDG_CACHE_HOME of the main job."""

    def __init__(self, cache: Path) -> None:
        self.log, self.pid = Path(os.devnull), 0
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kill_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"XDG_CACHE_HOME": str(cache)},
        )
        assert self.answer() == "ready"

    def answer(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def start(self, command: str, **arguments: Any) -> int:
        """Starts a command in a child; returns its process id."""
        assert self.process.stdin
        message = {"log": str(self.log), "command": command, "arguments": arguments}
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        self.pid = int(self.answer())
        return self.pid

    def ended(self) -> int:
        """Waits for the child; returns its exit code, negative for a signal."""
        code, self.pid = int(self.answer()), 0
        return code

    def interrupt(self) -> int:
        """Sends SIGINT until the child ends; returns its exit code.

        Once is not always enough: Python ignores a KeyboardInterrupt that is raised in a weak reference's callback.
        """
        assert self.process.stdout
        ended: list[Any] = []
        while not ended:
            os.kill(self.pid, signal.SIGINT)
            ended, _, _ = select.select([self.process.stdout], [], [], 5.0)
        return self.ended()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.ended() == -signal.SIGKILL, self.log.read_text()

    def clear(self) -> None:
        """Ends a child that a failed test left running."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.ended()

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


if __name__ == "__main__":
    serve()

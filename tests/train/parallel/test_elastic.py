"""Two agents of torchrun, as of two machines: one is lost in the middle of a run, and another takes its place."""

import os
import signal
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.support.ranks_pool import ROOT, Ranks
from tests.train.parallel.test_launch import run_main, words
from train.job.processes import launch

# An agent whose process is forked, as to start an interpreter takes longer than all it does.
LOST = """\
import dataclasses, os, signal, sys
from torch.distributed import run
from train import cli
from train.job.processes.worker import Worker

step, made, configured = Worker.step, [], run.config_from_args

def lost(worker, batch):
    made.append(batch)
    if len(made) == 5 and "LOST" in os.environ:
        os.kill(os.getppid(), signal.SIGKILL)  # the agent, and with it the machine
        os.kill(os.getpid(), signal.SIGKILL)
    return step(worker, batch)

def process(*arguments):
    Worker.step = lost
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the agent's handler, which a fork has too
    sys.argv = [*arguments[1:]]
    sys.exit(cli.main())

def forked(args):
    config, _, arguments = configured(args)
    return dataclasses.replace(config, start_method="fork"), process, arguments

run.config_from_args = forked
run.main()
"""


def agent(program: Path, port: int, *arguments: str, host: bool = False, lost: bool = False) -> subprocess.Popen[str]:
    """An agent with one process of a run of two; the `host` serves the rendezvous, and no run outlives it."""
    how = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    how += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "it", "--local-addr", "127.0.0.1"]
    how += ["--rdzv-conf", f"is_host={int(host)}"]  # else it is the agent that is first, which may be the lost one
    settings = {"XDG_CACHE_HOME": str(program.parent / "cache"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a new agent waits for an address that none tells again
    environment = os.environ | settings | {"PYTHONPATH": str(ROOT)} | ({"LOST": "1"} if lost else {})
    command = [sys.executable, str(program), *how, str(program), "--", *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_lost_agent_is_replaced_and_the_run_has_the_bits_of_an_uninterrupted_one(
    ranks: Ranks, tmp_path: Path
) -> None:
    program = tmp_path / "lost.py"
    program.write_text(LOST)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ("--mesh", "fsdp=2", "--save-every", "2")
    assert all(code == 0 for code, *_ in ranks(2)(run_main, str(tmp_path / "whole"), *flags))
    path = words(tmp_path / "run", *flags)
    agents = [agent(program, port, *path, "--resume", host=True)]
    try:
        agents.append(agent(program, port, *path, "--resume", lost=True))
        assert agents[1].wait(300) == -signal.SIGKILL
        agents.append(agent(program, port, *path, "--resume"))
        outputs = {number: agents[number].communicate(timeout=300) for number in (0, 2)}
        assert [agents[number].returncode for number in (0, 2)] == [0, 0], outputs
    finally:
        for process in agents:
            process.kill()
    assert sum(out.count("resuming at step 4 of 6") for out, _ in outputs.values()) == 1
    names = ("model.safetensors", "metrics.jsonl", "tokenizer.json")
    for name in names:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def start_of_all(store: Any, ranks: int) -> list[Any]:
    """What each process of a start agrees on, in threads."""
    found: list[Any] = [None] * ranks

    def join(rank: int) -> None:
        try:
            found[rank] = launch._agreed_start(store, rank, ranks)
        except (ValueError, RuntimeError) as error:
            found[rank] = error

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_processes_agree_on_a_start_in_a_store_that_has_keys_of_earlier_ones() -> None:
    store = HashStore()
    starts = [start_of_all(store, 4) for _ in range(3)]
    assert all(len(set(start)) == 1 for start in starts) and len({start[0] for start in starts}) == 3


def test_a_process_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    start_of_all(store, 3)  # whose keys are of no use to the next
    monkeypatch.setattr(launch, "JOIN_TIMEOUT", timedelta(seconds=1))
    found: list[Any] = []

    def join() -> None:
        with pytest.raises(ValueError, match="of them 2 did not come in 1 seconds") as raised:
            launch._agreed_start(store, 1, 3)
        found.append(raised)

    thread = threading.Thread(target=join)
    thread.start()
    with pytest.raises(ValueError, match="of them 2 did not come in 1 seconds"):
        launch._agreed_start(store, 0, 3)
    thread.join()
    assert found

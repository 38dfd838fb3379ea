"""Two agents of torchrun, as of two machines: one is lost in the middle of a run, and another takes its place."""

import json
import signal
import socket
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.support.forks import Forks
from tests.support.ranks_pool import ROOT, Ranks
from tests.train.parallel.test_launch import run_main, words
from train.job.processes import launch

# An agent whose process is forked, as the agent itself is: to start an interpreter takes longer than all it does.
LOST = """\
import dataclasses, os, signal, sys
from torch.distributed import run
from pytest import MonkeyPatch
from tests.support.pictures import leave_out_pixels
from train import cli
from train.job.processes.worker import Worker

leave_out_pixels(MonkeyPatch())
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


# Starts the agents one after the other, each a fork with its own environment and output, and says how they ended. The
# first serves the rendezvous, and no run outlives it; the second is lost, and then the third takes its place.
AGENTS = """\
import json, os, signal, sys
from tests.support.forks import execute

def start(number, environment):
    pid = os.fork()
    if not pid:
        for stream, ending in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{number}.{ending}", os.O_WRONLY | os.O_CREAT), stream)
        os.environ.update(environment)
        host = f"is_host={int(number == 0)}"  # else it is the agent that is first, which may be the lost one
        execute([word.replace("IS_HOST", host) for word in sys.argv[1:]])
    return pid

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

begun = [start(0, {}), start(1, {"LOST": "1"})]
codes = {1: ended(begun[1])}
if codes[1] == -signal.SIGKILL:
    begun.append(start(2, {}))
    codes |= {2: ended(begun[2]), 0: ended(begun[0])}
else:
    os.kill(begun[0], signal.SIGKILL)
print(json.dumps(codes))
"""


def run_of_agents(forks: Forks, folder: Path, port: int, *arguments: str) -> dict[str, int]:
    """{number of the agent: its exit code} of three, of which two at a time run one process each of a run of two."""
    for name, source in {"lost.py": LOST, "agents.py": AGENTS}.items():
        (folder / name).write_text(source)
    program = str(folder / "lost.py")
    how = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    how += ["--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "it", "--local-addr", "127.0.0.1"]
    how += ["--rdzv-conf", "IS_HOST"]
    settings = {"XDG_CACHE_HOME": str(folder / "cache"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else a new agent waits for an address that none tells again
    words = [folder / "agents.py", program, *how, program, "--", *arguments]
    done = forks.run(words, settings | {"PYTHONPATH": str(ROOT)}, cwd=folder)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_lost_agent_is_replaced_and_the_run_has_the_bits_of_an_uninterrupted_one(
    ranks: Ranks, forks: Forks, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ("--mesh", "fsdp=2", "--save-every", "2")
    assert all(code == 0 for code, *_ in ranks(2)(run_main, str(tmp_path / "whole"), *flags))
    codes = run_of_agents(forks, tmp_path, port, *words(tmp_path / "run", *flags), "--resume")
    outputs = {path.name: path.read_text() for path in tmp_path.glob("[0-2].*")}
    assert codes == {"0": 0, "1": -signal.SIGKILL, "2": 0}, outputs
    assert sum(outputs[f"{number}.out"].count("resuming at step 4 of 6") for number in (0, 2)) == 1
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

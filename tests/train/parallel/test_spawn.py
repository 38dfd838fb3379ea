"""`python -m train --mesh` without torchrun: it starts processes, passes Ctrl-C on, and names one that was killed."""

import ipaddress
import json
import multiprocessing
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.forks import Forks
from tests.support.ranks_pool import ROOT
from tests.train.parallel.test_launch import assert_close, losses, words
from train.cli import main
from train.comm.torchrun import STORE, is_started
from train.job.processes import spawn
from train.job.processes.launch import starter_reports

# A program of its own process group, as a terminal's; its processes are forked, as to start interpreters takes longer
# than all they do.
FORKED = """\
import multiprocessing, os, signal, sys, tempfile
from pytest import MonkeyPatch
from tests.support.pictures import leave_out_pixels
from train.cli import main
from train.job.processes import spawn

def process(*arguments, run=spawn._process):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not the handlers of the starting process, which a fork has too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run(*arguments)
    except SystemExit as end:  # the interpreter would wait for threads that a fork does not have
        sys.stdout.flush()
        os._exit(end.code)

leave_out_pixels(MonkeyPatch())
tempfile.tempdir = None  # the environment is that of the program, and not of what it was forked from
os.setpgid(0, 0)
with open(sys.argv.pop(1), "w") as file:
    file.write(f"{os.getpid()} ")
spawn._process, spawn.CONTEXT = process, multiprocessing.get_context("fork")
sys.exit(main())
"""


@dataclass(frozen=True)
class Started:
    """A run in the background. process: its id, that of its process group too; done: its end."""

    path: Path
    process: int
    done: Future[subprocess.CompletedProcess[str]]

    def processes(self) -> list[int]:
        """The ids of the run's processes in the order of their start."""
        listed = subprocess.run(
            ["ps", "-ww", "--ppid", str(self.process), "-o", "pid=,args="], capture_output=True, text=True, check=True
        )
        return sorted(int(line.split()[0]) for line in listed.stdout.splitlines() if "resource_tracker" not in line)

    def in_its_third_step(self) -> None:
        metrics = self.path / "metrics.jsonl"
        while not self.done.done() and (not metrics.exists() or metrics.read_text().count("\n") < 2):
            time.sleep(0.05)


@contextmanager
def start(forks: Forks, path: Path, *flags: str) -> Iterator[Started]:
    program, number = path.parent / "forked.py", path.parent / "process"
    program.write_text(FORKED)
    with ThreadPoolExecutor(1) as background:
        arguments: list[str | Path] = [program, number, *words(path, *flags)]
        done = background.submit(forks.run, arguments, environment(path) | {"PYTHONPATH": str(ROOT)})
        while not done.done() and not (number.exists() and number.read_text().endswith(" ")):
            time.sleep(0.05)
        started = Started(path, int(number.read_text()), done)
        try:
            yield started
        finally:
            if not done.done():
                os.killpg(started.process, signal.SIGKILL)


def environment(path: Path) -> dict[str, str]:
    own = {"XDG_CACHE_HOME": str(path.parent / "cache"), "TMPDIR": str(path.parent), "OMP_NUM_THREADS": "1"}
    return own | {"GLOO_SOCKET_IFNAME": "none"}  # there is no such interface: an own start talks over the loopback one


@pytest.mark.slow
def test_it_makes_the_run_of_one_process_and_ctrl_c_reaches_all(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by Ctrl-C, and gone on with as a user does, whose processes are spawned."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    more = ("--steps", "24", "--save-every", "24", "--eval-every", "12")  # seldom: each takes longer than a step
    with start(forks, tmp_path / "two", "--mesh", "fsdp=2", *more) as started:
        started.in_its_third_step()
        os.killpg(started.process, signal.SIGINT)
        done = started.done.result(300)
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip() == "stopping after this step, then saving; once more to stop at once"
    (step,) = re.findall(r"^stopped at step (\d+) of 24, saved; resume with: ", done.stdout, re.MULTILINE)
    assert 2 <= int(step) < 24
    assert (tmp_path / "two" / "steps" / f"step-{int(step):08d}" / "progress.json").exists()

    flags = words(tmp_path / "two", "--mesh", "fsdp=2", "--nproc", "2", "--resume", *more)
    command, own = [sys.executable, "-m", "train", *flags], environment(tmp_path / "two")
    done = subprocess.run(command, env={**os.environ, **own}, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr and f"resuming at step {step} of 24" in done.stdout
    assert main(words(tmp_path / "one", *more)) == 0
    assert_close(losses(tmp_path / "two"), losses(tmp_path / "one"))
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two")]
    assert summaries[0].keys() == summaries[1].keys()


@pytest.mark.slow
def test_a_killed_process_ends_all_with_one_sentence(forks: Forks, tmp_path: Path) -> None:
    with start(forks, tmp_path / "run", "--mesh", "fsdp=2", "--steps", "100000") as started:
        started.in_its_third_step()
        pids = started.processes()
        os.kill(pids[1], signal.SIGKILL)
        done = started.done.result(300)
    assert done.returncode == 2
    assert done.stderr == "python -m train: process 1 of the run was ended by SIGKILL, and so all have ended.\n"
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def sockets(process: int) -> set[tuple[str, str]]:
    """{(protocol, address)} of the sockets at which the process waits for others, of Linux's tables."""
    handles = set()
    for handle in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            handles.add(os.readlink(handle))
    found = set()
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{process}/net/{protocol}").read_text().splitlines()[1:]:
            _, local, remote, state, *rest = line.split()
            waits = state == "0A" if protocol.startswith("tcp") else set(remote) <= set("0:")
            if waits and f"socket:[{rest[5]}]" in handles:
                words_of_4_bytes = bytes.fromhex(local.partition(":")[0])
                address = b"".join(words_of_4_bytes[i : i + 4][::-1] for i in range(0, len(words_of_4_bytes), 4))
                found.add((protocol, str(ipaddress.ip_address(address))))
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's tables of sockets")
def test_its_processes_listen_on_the_loopback_interface_alone(forks: Forks, tmp_path: Path) -> None:
    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("::", 0), family=socket.AF_INET6):
        assert {("tcp", "0.0.0.0"), ("tcp6", "::")} <= sockets(os.getpid())  # what must not be seen would be
    with start(forks, tmp_path / "run", "--mesh", "fsdp=2", "--steps", "100000") as started:
        started.in_its_third_step()
        (folder,) = tmp_path.glob("fnmodels-*")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "store").exists()
        pids = started.processes()
        found = [sockets(pid) for pid in (started.process, *pids)]
        os.kill(pids[0], signal.SIGKILL)
        started.done.result(300)
    assert not found[0] and all(found[1:])  # gloo's
    assert set().union(*found) == {("tcp", "127.0.0.1")}
    assert not folder.exists()


@pytest.mark.slow
def test_modules_in_the_working_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("multiprocessing", "tempfile", "socket", "train"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'IMPORTED')!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spawn, "_process", print)  # builtins alone are unpickled in the process, which imports no torch
    assert spawn.start(len, [], 1) == 0  # type: ignore[arg-type]
    assert not (tmp_path / "IMPORTED").exists()


def test_a_mistake_that_the_first_process_finds_is_one_sentence(forks: Forks, tmp_path: Path) -> None:
    with start(forks, tmp_path / "run", "--mesh", "fsdp=2", "--batch-rows", "3") as started:
        done = started.done.result(300)
    assert done.returncode == 2
    said = "python -m train: --mesh fsdp=2 splits the rows of a batch over 2 ranks, and --batch-rows is 3.\n"
    assert done.stderr == said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--mesh", "fdsp=2"), "--mesh fdsp=2: 'fdsp' is no dimension of a mesh; there are "),
        (
            ("--mesh", "fsdp=2", "--nproc", "3"),
            "--nproc 3: --mesh fsdp=2 is of 2 processes: leave --nproc out, or give 2",
        ),
        (("--nproc", "2"), "--nproc 2: say how they share the work, as with --mesh fsdp=2"),
        (("--mesh", "fsdp=2", "--nproc", "two"), "argument --nproc: 'two' is not a whole number from 1"),
        (("--mesh", "fsdp=2", "--sequense"), "there is no flag --sequense; the nearest is --sequence"),
    ],
)
def test_a_wrong_flag_is_said_before_a_process_is_started(
    flags: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not is_started()
    assert main(words(tmp_path / "run", *flags)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"python -m train: {said}") and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_without_run_under_torchrun_the_two_dashes_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--mesh", "fsdp=2"]) == 2
    assert " -- " not in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert main(["--mesh", "fsdp=2"]) == 2
    said = "torchrun takes --run for its own, unless the flags stand behind --: torchrun ... -m train -- --run DIR"
    assert said in capsys.readouterr().err


def test_a_hang_is_reported_by_the_process_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that started all sees none that has ended then."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert not starter_reports("Connection closed by peer")
    monkeypatch.setenv(STORE, "a file")
    assert starter_reports("Connection closed by peer")
    assert not starter_reports("Timed out waiting 200ms for recv operation to complete")


@pytest.mark.parametrize(("code", "of_run"), [(0, 0), (4, 4), (130, 130), (1, 2)])
def test_exit_code_of_the_processes_is_the_runs(code: int, of_run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all have ended before the first look at them."""
    made = [multiprocessing.get_context("fork").Process(target=os._exit, args=(code,)) for _ in range(2)]
    for process in made:
        process.start()
        process.join()
    monkeypatch.setattr(spawn, "_start_processes", lambda *_: made)
    assert spawn.start(main, [], 2) == of_run

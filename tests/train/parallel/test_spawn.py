"""`python -m train --mesh` without torchrun: it starts processes, passes Ctrl-C on, and names one that was killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.ranks_pool import ROOT
from tests.train.parallel.test_launch import assert_close, losses, words
from train.cli import main
from train.dist.torchrun import is_started
from train.job.processes.launch import starter_reports


@contextmanager
def start(path: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"XDG_CACHE_HOME": str(path.parent / "cache"), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "train", *words(path, *flags)],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal's
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def started_by(process: subprocess.Popen[str]) -> list[int]:
    """The ids of the run's processes in the order of their start."""
    listed = subprocess.run(
        ["ps", "-ww", "--ppid", str(process.pid), "-o", "pid=,args="], capture_output=True, text=True, check=True
    )
    lines = [line for line in listed.stdout.splitlines() if "spawn_main" in line]
    return sorted(int(line.split()[0]) for line in lines)


def in_its_third_step(path: Path, process: subprocess.Popen[str]) -> None:
    metrics = path / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or metrics.read_text().count("\n") < 2):
        time.sleep(0.05)


@pytest.mark.slow
def test_it_makes_the_run_of_one_process_and_ctrl_c_reaches_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    more = ("--steps", "40", "--save-every", "40", "--eval-every", "20")  # seldom: each takes longer than a step
    with start(tmp_path / "two", "--mesh", "fsdp=2", *more) as process:
        in_its_third_step(tmp_path / "two", process)
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert err.strip() == "stopping after this step, then saving; once more to stop at once"
    (step,) = re.findall(r"^stopped at step (\d+) of 40, saved; resume with: ", out, re.MULTILINE)
    assert 2 <= int(step) < 40
    assert (tmp_path / "two" / "steps" / f"step-{int(step):08d}" / "progress.json").exists()

    with start(tmp_path / "two", "--mesh", "fsdp=2", "--nproc", "2", "--resume", *more) as process:
        out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and not err and f"resuming at step {step} of 40" in out
    assert main(words(tmp_path / "one", *more)) == 0
    assert_close(losses(tmp_path / "two"), losses(tmp_path / "one"))
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two")]
    assert summaries[0].keys() == summaries[1].keys()


@pytest.mark.slow
def test_a_killed_process_ends_all_with_one_sentence(tmp_path: Path) -> None:
    with start(tmp_path / "run", "--mesh", "fsdp=2", "--steps", "100000") as process:
        in_its_third_step(tmp_path / "run", process)
        pids = started_by(process)
        os.kill(pids[1], signal.SIGKILL)
        _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err == "python -m train: process 1 of the run was ended by SIGKILL, and so all have ended.\n"
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_a_mistake_that_the_first_process_finds_is_one_sentence(tmp_path: Path) -> None:
    with start(tmp_path / "run", "--mesh", "fsdp=2", "--batch-rows", "3") as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err == "python -m train: --mesh fsdp=2 splits the rows of a batch over 2 ranks, and --batch-rows is 3.\n"
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
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "train-1")
    assert starter_reports("Connection closed by peer")
    assert not starter_reports("Timed out waiting 200ms for recv operation to complete")

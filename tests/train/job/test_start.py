"""What is checked before a run begins: threads, the mesh, the disk, and the length of rows."""

import re
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import params as P
from tests.train.job.test_run import TINY, own_cache, same, text, train  # noqa: F401  fixtures
from train.job.disk_room import brief
from train.job.processes import spawn, threads
from train.job.watch.waiting import Waiting

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def _threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def group_files(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """A folder of /proc and one of /sys/fs/cgroup."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder / "cgroup", folder / "mount"


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cgroup": "0::/a/b\n", "mount/a/cpu.max": "150000 100000\n", "mount/a/b/cpu.max": "max 100000\n"}, 2),
        ({"cgroup": "0::/../outside\n", "mount/cpu.max": "300000 100000\n"}, 3),
        (
            {
                "cgroup": "4:memory:/x\n3:cpu,cpuacct:/x\n",
                "mount/cpu,cpuacct/x/cpu.cfs_quota_us": "50000\n",
                "mount/cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        ({"cgroup": "1:cpu:/\n", "mount/cpu/cpu.cfs_quota_us": "-1", "mount/cpu/cpu.cfs_period_us": "100000"}, 8),
        ({}, 8),
    ],
)
def test_usable_cores_are_those_of_the_affinity_and_of_every_control_group(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups, mount = group_files(tmp_path, files)
    monkeypatch.setattr(threads, "GROUPS", groups)
    monkeypatch.setattr(threads, "MOUNT", mount)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert threads.usable_cores() == cores


@pytest.mark.usefixtures("_threads")
def test_threads_are_those_of_the_flag_else_of_the_environment_else_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(4)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    threads.set_threads(None)
    assert torch.get_num_threads() == 4
    threads.set_threads(3)
    assert torch.get_num_threads() == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(threads, "usable_cores", lambda: 5)
    for beside, count in (("1", 3), ("2", 2), ("16", 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", beside)
        threads.set_threads(None)
        assert torch.get_num_threads() == count
        torch.set_num_threads(3)


def test_steps_that_wait_for_processors_are_said_once() -> None:
    waiting = Waiting(threads=2)
    assert waiting.observe(1, 15.0, 4.0) == []
    (line,) = waiting.observe(2, 15.0, 4.0)
    assert line.startswith("step 2: steps of 30 s had 8 s of processor time") and "--threads 1 may be" in line
    assert waiting.observe(3, 60.0, 4.0) == []
    assert Waiting(threads=2).observe(1, 60.0, 50.0) == []
    assert "--threads" not in Waiting(threads=1).observe(1, 60.0, 10.0)[0]


def test_rows_that_the_mesh_cannot_share_are_refused_before_processes_start(
    tmp_path: Path,
    text: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def start(*_: Any) -> int:
        raise AssertionError("processes were started")

    monkeypatch.setattr(spawn, "start", start)
    assert train(tmp_path / "run", text, "--mesh", "fsdp=8", "--batch-rows", 4) == 2
    said = "--mesh fsdp=8 splits the rows of a batch over 8 ranks, and --batch-rows is 4"
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()
    (tmp_path / "a.toml").write_text("batch_rows = 12")
    assert train(tmp_path / "run", text, "--mesh", "fsdp=8", "--config", tmp_path / "a.toml") == 2
    assert "and --batch-rows is 12" in capsys.readouterr().err


def test_a_disk_without_room_for_a_save_is_said_before_the_first_step(
    tmp_path: Path,
    text: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    assert train(run, text, "--steps", 1) == 0
    (step,) = (run / "steps").glob("step-*")
    size = sum(file.stat().st_size for file in (*step.iterdir(), run / "model.safetensors"))
    capsys.readouterr()
    for free, code in ((round(0.9 * size), 2), (round(1.1 * size), 0)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: Usage(0, 0, free))
        assert train(tmp_path / f"other{code}", text, "--steps", 1) == code
        err = capsys.readouterr().err
        assert (f"and the disk has {brief(free)} left: free some" in err) is (code == 2)


def test_a_run_says_how_long_it_will_take_before_its_first_step(
    tmp_path: Path,
    text: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("train.job.run.FORESEEN", 3)
    assert train(tmp_path / "run", text, "--steps", 3) == 0
    out = capsys.readouterr().out
    assert re.search(r"^3 steps will take about 0:00:\d\d, by the time of a forward pass", out, re.MULTILINE)
    assert out.index("will take about") < out.index("step 1/3")
    monkeypatch.setattr("train.job.run.FORESEEN", 4)
    assert train(tmp_path / "plain", text, "--steps", 3) == 0
    assert "will take" not in capsys.readouterr().out
    assert same(tmp_path / "run", tmp_path / "plain") == []


def test_sizes_have_units() -> None:
    sizes = (512, 2000, 3 * 2**20, 2.5 * 2**30, 2**41)
    assert list(map(brief, sizes)) == ["512 bytes", "1.95 KiB", "3 MiB", "2.5 GiB", "2 TiB"]


def test_rows_above_a_checkpoints_positions_are_refused_and_the_default_fits(
    tmp_path: Path,
    text: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    base = tmp_path / "base"
    assert train(base, text, "--steps", 1) == 0
    assert P.load_config(base).max_position_embeddings == TINY.row_length
    assert train(tmp_path / "run", text, "--init", base, "--row-length", 33, "--steps", 1) == 2
    assert f"--row-length 33: --init {base} has 32 positions: give no more" in capsys.readouterr().err
    assert train(tmp_path / "run", text, "--init", base, "--steps", 1, defaults=replace(TINY, row_length=64)) == 0


def test_after_a_failed_first_save_a_resume_says_that_it_starts_anew(
    tmp_path: Path,
    text: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("train.checkpoint.saved_steps.write_tensors", fails)
        assert train(run, text, "--steps", 2) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert train(run, None, "--resume") == 0
    assert f"no complete checkpoint in {run}: starting at step 0" in capsys.readouterr().out

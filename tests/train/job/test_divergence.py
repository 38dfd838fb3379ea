"""A run whose loss is not finite at its end: one line, exit code 4, and the same when it is resumed."""

import math
from pathlib import Path

import pytest

from tests.train.commands import test_documents as documents
from tests.train.commands import test_flow as flow
from tests.train.job.test_run import own_cache, rows, stop_after, text, train  # noqa: F401  two of them fixtures
from train.command_line import DIVERGED
from train.job.metrics_log import diverged_since, exit_code

HUGE = ("--learning-rate", "1e30")


def row(step: int, loss: float | None, grad_norm: float | None = 1.0) -> dict[str, float | int | None]:
    return {"step": step, "loss": loss, "grad_norm": grad_norm}


def test_diverged_since_is_the_first_step_of_the_last_run_of_bad_ones() -> None:
    assert diverged_since([]) is None
    assert diverged_since([row(1, math.nan), row(2, 3.0)]) is None
    assert diverged_since([row(1, math.nan), row(2, 3.0), row(3, 3.0, math.inf), row(4, None, None)]) == 3
    assert diverged_since([row(1, math.inf), row(2, math.nan)]) == 1


def test_exit_code_of_a_heldout_loss_that_is_not_finite_is_that_of_a_diverged_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code([row(1, 2.0)], heldout_loss=2.0) == 0 and not capsys.readouterr().err
    assert exit_code([row(1, 2.0)], heldout_loss=math.nan) == DIVERGED
    assert capsys.readouterr().err.startswith("The run has diverged: the loss on held-out text is not finite;")


def test_main_job_that_diverged_says_so_and_so_does_its_resume(
    tmp_path: Path,
    text: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stopped, run = tmp_path / "stopped", tmp_path / "run"
    assert train(run, text, *HUGE) == DIVERGED
    first = next(row["step"] for row in rows(run) if not row["finite"])
    assert 1 < first < 5
    line = f"The run has diverged: the loss or its gradient is not finite from step {first} to the last, 6, so these"
    assert [said.startswith(line) for said in capsys.readouterr().err.splitlines()].count(True) == 1
    assert train(run, None, "--resume") == DIVERGED
    assert line in capsys.readouterr().err
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        assert train(stopped, text, *HUGE) == 130
    capsys.readouterr()
    assert train(stopped, None, "--resume") == DIVERGED
    err = capsys.readouterr().err
    assert f"The run that is resumed has diverged: since step {first} " in err and line in err


def test_flow_that_diverged_says_so_and_so_does_its_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, run = tmp_path / "data.safetensors", tmp_path / "run"
    flow.save_file(flow.tensors(), data)
    assert flow.started(run, data, "--steps", "6", *HUGE) == DIVERGED
    assert "NaN" not in (run / "metrics.jsonl").read_text() and flow.losses(run)[-1] is None
    assert "The run has diverged: the loss or its gradient is not finite from step " in capsys.readouterr().err
    assert flow.started(run, data, "--steps", "6", *HUGE, "--resume") == DIVERGED
    assert "The run has diverged" in capsys.readouterr().err  # it is finished


def test_labels_that_diverged_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    init = documents.folder_of(tmp_path / "init", documents.CONFIG)
    data = documents.lines(tmp_path / "data.jsonl", documents.LABELS)
    flags = ["--run", str(tmp_path / "run"), "--data", str(data), "--init", str(init), "--loss", "labels"]
    assert documents.main([*flags, "--steps", "6", "--batch", "6", *HUGE]) == DIVERGED
    assert "The run has diverged" in capsys.readouterr().err

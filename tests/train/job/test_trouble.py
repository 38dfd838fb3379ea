"""Runs in trouble: what is noticed when, how a run ends or goes back, and that healthy runs give no warning."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from tests.train.job.test_run import own_cache, rows, same, saved, stop_after, text, train  # noqa: F401  fixtures
from train.command_line import BAD_STEPS
from train.eval.early_stopping import EarlyStopping
from train.job.watch.slow_ranks import SlowRanks
from train.job.watch.trouble import Trouble

HOT = ("--learning-rate", "1000", "--warmup", "0", "--dtype", "float32")


def row(step: int, loss: float | None, finite: bool = True) -> dict[str, Any]:
    return {"step": step, "loss": loss, "finite": finite}


def said(losses: list[float]) -> tuple[list[str], Trouble]:
    trouble = Trouble()
    return [line for step, loss in enumerate(losses, 1) for line in trouble.observe(row(step, loss))], trouble


def test_a_jump_is_two_steps_above_the_bound_and_one_line_until_a_good_step() -> None:
    noise = random.Random(0)
    falling = [6 * math.exp(-step / 40) + 1 + noise.gauss(0, 0.1) for step in range(100)]
    assert said(falling)[0] == []
    lines, trouble = said([*falling, 9.0, *falling[90:]])
    assert lines == [] and trouble.counts["loss_jumps"] == 0  # one bad batch
    lines, trouble = said([*falling, 9.0, 9.5, 9.2, *falling[90:]])
    assert [line[:9] for line in lines] == ["step 102:", "step 104:"] and "jumped to 9.500" in lines[0]
    assert "after 3 bad ones" in lines[1] and trouble.counts["loss_jumps"] == 1 and trouble.bad == 0


def test_a_new_level_of_the_loss_is_accepted_after_a_window() -> None:
    lines, trouble = said([2.0] * 60 + [5.0] * 60)
    assert len(lines) == 2 and trouble.bad == 0 and "jumped" in lines[0]


def test_updates_that_are_skipped_are_counted_and_said_at_first() -> None:
    trouble = Trouble([row(1, 2.0), row(2, None, finite=False), row(3, 2.0, finite=False)])
    assert trouble.bad == 2 and trouble.counts["skipped_updates"] == 2
    assert trouble.observe(row(4, math.nan, finite=False)) == []
    assert trouble.observe(row(5, 1.9)) == ["step 5: a good step, with the loss 1.900, after 3 bad ones"]


def test_gradients_that_are_all_zero_are_bad_steps() -> None:
    trouble = Trouble([row(1, 5.7)])
    assert trouble.observe(row(2, 5.7) | {"grad_norm": 0.0}) == []  # a batch without a target
    assert trouble.observe(row(3, 5.7) | {"grad_norm": 0.0}) == [
        "step 3: all gradients are zero, so nothing is learned"
    ]
    assert trouble.bad == 2 and trouble.counts["zero_gradients"] == 1


def test_a_loss_that_does_not_decrease_is_said_at_powers_of_two() -> None:
    lines, trouble = said([3.0 + 0.01 * (step % 5) for step in range(600)])
    assert [line.split(":")[0] for line in lines] == ["step 128", "step 256", "step 512"]
    assert trouble.counts["no_decrease"] == 3
    assert said([3.0 - 0.001 * step for step in range(600)])[0] == []


def test_a_run_at_a_rate_of_1000_is_noticed_within_ten_steps_and_ends_as_asked(
    tmp_path: Path,
    text: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    flags = ("--steps", 40, "--stop-after-bad", 4, "--save-every", 2)
    assert train(run, text, *flags, *HOT) == BAD_STEPS
    err = capsys.readouterr().err
    noticed = int(err.split("warning: step ")[1].split(":")[0])
    assert noticed == 2 and "the loss has jumped to" in err  # to 10 million
    last = rows(run)[-1]["step"]
    assert f"The run has ended at step {last}, as its last 4 steps were bad ones" in err and last <= 12
    assert all(step <= last - 4 for step in saved(run))


def test_a_run_goes_back_to_its_last_good_save_with_other_batches_three_times(
    tmp_path: Path,
    text: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, flags = tmp_path / "run", ("--steps", 40, "--on-divergence", "rewind")
    assert train(run, text, *flags, *HOT) == BAD_STEPS
    out, err = capsys.readouterr()
    assert [f"(return {number} of 3)" in out for number in (1, 2, 3, 4)] == [True, True, True, False]
    assert "The run has ended at step " in err and saved(run) == [0]


def test_a_run_that_goes_back_once_finishes_and_so_does_its_resume(
    tmp_path: Path,
    text: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A bad range of batches: of steps 7 to 11 alone, which the second data order passes over."""
    from train.job.processes.worker import Worker
    from train.job.tasks.language_model import LanguageModel

    real_batch, real_step, current = LanguageModel.batch, Worker.step, []

    def batch(self: Any, step: int) -> Any:
        current[:] = [step]
        return real_batch(self, step)

    def step(self: Any, batch: Any) -> Any:
        state, metrics = real_step(self, batch)
        return state, metrics | ({"loss": metrics["loss"] + 100} if current[0] in range(6, 11) else {})

    monkeypatch.setattr(LanguageModel, "batch", batch)
    monkeypatch.setattr(Worker, "step", step)
    flags = ("--steps", 14, "--save-every", 5, "--on-divergence", "rewind", "--dtype", "float32")
    assert train(tmp_path / "whole", text, *flags) == 0
    assert "back to the save of step 5, from where 6 batches are passed over (return 1 of 3)" in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path / "whole")] == list(range(1, 15))
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert summary["trouble"] == {
        **dict.fromkeys(("skipped_updates", "loss_jumps", "zero_gradients", "no_decrease"), 0),
        "rewinds": 1,
    }
    assert "| returns to an earlier save | 1 |" in (tmp_path / "whole" / "README.md").read_text()
    with monkeypatch.context() as patch:
        stop_after(patch, 8)  # counted from the return on: the signals of each loop are its own
        assert train(tmp_path / "parts", text, *flags) == 130
    assert train(tmp_path / "parts", None, "--resume") == 0
    assert same(tmp_path / "whole", tmp_path / "parts") == []


def test_early_stopping_ends_a_run_and_its_resume_says_that_it_is_finished(
    tmp_path: Path,
    text: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "own.py").write_text(
        "from train.eval.early_stopping import EarlyStopping\n"
        "seen = []\n"
        "stopping = EarlyStopping(patience=2, least=100.0)\n"
        "def on_step(state, metrics):\n"
        "    seen.append((int(state.step), metrics['step']))\n"
        "    return stopping(state, metrics)\n"
    )
    own, run = f"{tmp_path / 'own.py'}:on_step", tmp_path / "run"
    assert train(run, text, "--steps", 12, "--eval-every", 2, "--on-step", own) == 0
    out = capsys.readouterr().out
    assert "ended at step 6 of 12 by --on-step: the held-out loss has not been below" in out
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 6 and "in 2 evaluations" in summary["ended_by"]
    assert train(run, None, "--resume", "--on-step", own) == 0
    assert "the run is finished: 6 steps" in capsys.readouterr().out
    assert train(run, None, "--resume") == 2
    assert "code that a folder may not run: give it again" in capsys.readouterr().err


def test_early_stopping_of_a_resumed_run_knows_the_rows_before() -> None:
    losses = [3.0, 2.0, 2.5, 2.4, 2.3]
    rows_of_run = [{"step": step, "heldout_loss": loss} for step, loss in enumerate(losses, 1)]
    resumed = EarlyStopping()
    resumed.replay([{"step": 1, "heldout_loss": 9.0}])
    resumed.replay(rows_of_run[:4])
    assert resumed(None, {"step": 5}) is None
    reason = resumed(None, rows_of_run[4])
    assert reason == "the held-out loss has not been below 2.0000 at step 2 in 3 evaluations"


def test_a_slow_rank_is_said_at_the_third_measurement_and_when_it_recovers() -> None:
    ranks, slow, even = SlowRanks(), [1.0, 1.1, 2.0, 1.0], [1.0, 1.1, 1.2, 1.0]
    assert ranks.observe(50, slow) == ranks.observe(100, slow) == []
    (line,) = ranks.observe(150, slow)
    assert line.startswith("step 150: process 2 of the run computes 2.0 times as long as the others")
    assert ranks.observe(200, slow) == []
    assert ranks.observe(250, even) == ["step 250: process 2 computes as fast as the others again"]
    assert [ranks.observe(step, times) for step, times in ((1, slow), (2, even), (3, slow), (4, slow))] == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--model", "qwen3", "--optimizer", "sgd", "--warmup", 0),
        ("--model", "gemma2", "--label-smoothing", 0.1, "--batch-rows", 1),
        ("--model", "olmo2", "--optimizer", "muon"),
        ("--model", "cohere", "--optimizer", "lion"),
        ("--model", "phi3", "--optimizer", "adafactor"),
        ("--model", "gpt2", "--set", "num_key_value_heads=null,rms_norm_eps=null,intermediate_size=null"),
        ("--model", "lfm2", "--batch-rows", 1),
        ("--model", "mixtral", "--set", "num_local_experts=4,num_experts_per_tok=2"),
    ],
    ids=str,
)
def test_healthy_runs_give_no_warning(
    flags: tuple[Any, ...],
    tmp_path: Path,
    text: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Past step 128, the first at which a loss that does not decrease is said."""
    assert train(tmp_path / "run", text, "--steps", 130, "--eval-every", 130, *flags) == 0
    assert "warning: step" not in capsys.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["trouble"].values()) == {0}

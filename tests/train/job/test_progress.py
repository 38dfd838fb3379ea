"""The line of progress of a run."""

import pytest

from train.job.progress import progress


def test_the_time_that_is_left_is_not_guessed_from_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(4000, 0) as report:
        report(1, 6.0, 1e-3, 50.0)
        report(2, 5.9, 1e-3, 900.0)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 1/4000  loss  6.000  lr 1.0e-03  50 tokens/s"
    assert second == "step 2/4000  loss  5.900  lr 1.0e-03  900 tokens/s  0:00:00 left"

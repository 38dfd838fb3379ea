"""Exceptions in code that the command line names: a sentence with its path, the step, the error and the traceback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fnmodels.errors import UserError
from params.imported import imported_family
from tests.train.job.test_run import own_cache, same, saved, text, train  # noqa: F401  fixtures
from train.imported import FunctionFailed, Imported
from train.job.processes.controller import CommandFailed
from train.job.settings import Settings
from train.job.watch.failures import keeping_traceback, naming_code

OWN = """
from pathlib import Path

import train

BROKEN = Path(__file__).with_name("broken")
calls = []


def fail(number):
    calls.append(number)
    if BROKEN.exists() and len(calls) == number:
        return {}["nothing"]


def on_step(state, metrics):
    fail(3)


def loss(params, batch, *, config):
    fail(4)
    return train.next_token_loss(params, batch, config=config)


def rate(step, steps):
    if BROKEN.exists() and step == 4:
        return {}["nothing"]
    return 1.0


def texts():
    for number in range(3000):
        if BROKEN.exists() and number == 2000:
            raise OSError("the disk is gone")
        yield f"text {number} of many"
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], str]:
    """(name of a function) -> its import path, in a file of its own, which is executed anew for each test."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "broken").touch()
    return lambda name: f"{tmp_path / 'own.py'}:{name}"


@pytest.mark.parametrize(
    ("flag", "name", "step", "last"),
    [("--on-step", "on_step", 3, 2), ("--loss", "loss", 4, 2), ("--decay-shape", "rate", 4, 2)],
)
def test_a_failing_function_is_named_with_its_step_and_its_traceback_is_kept(
    tmp_path: Path,
    text: Path,  # noqa: F811
    own: Callable[[str], str],
    capsys: pytest.CaptureFixture[str],
    flag: str,
    name: str,
    step: int,
    last: int,
) -> None:
    run, flags = tmp_path / "run", (flag, own(name), "--save-every", 2, "--steps", 5)
    assert train(run, text, *flags) == 2
    err = capsys.readouterr().err
    assert f"{flag} {own(name)} failed at step {step}: KeyError: 'nothing' in own.py, line " in err
    assert f"(traceback: {run / 'failure.txt'}); --resume goes on from the save of step {last}." in err
    assert err.count("\n") == 1 and "KeyError" in (run / "failure.txt").read_text()
    assert saved(run) == [last]
    (tmp_path / "broken").unlink()
    assert train(run, None, "--resume", *flags[:2]) == 0  # the function is mended
    assert not (run / "failure.txt").exists()
    assert train(tmp_path / "whole", text, *flags) == 0
    assert same(tmp_path / "whole", run) == []


def test_a_failing_source_is_named_and_a_mended_one_may_start_anew(
    tmp_path: Path, own: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert train(run, None, "--data", own("texts")) == 2
    err = capsys.readouterr().err
    assert f"{own('texts')} failed: OSError: the disk is gone in own.py, line " in err and "nothing is saved yet" in err
    (tmp_path / "broken").unlink()
    assert train(run, None, "--data", own("texts")) == 0


def test_errors_of_other_code_stay_what_they_are(tmp_path: Path, own: Callable[[str], str]) -> None:
    settings = Settings(loss=own("loss"))
    for error in (KeyError("ours"), UserError("a sentence"), MemoryError(), KeyboardInterrupt()):
        with pytest.raises(type(error)), keeping_traceback(tmp_path, settings):
            raise error
    assert not (tmp_path / "failure.txt").exists()

    def of_a_mesh() -> Any:
        fail = Imported(own("fail"), "--loss").function
        try:
            for _ in range(9):
                fail(2)
        except KeyError as error:
            raise CommandFailed(error) from error

    with pytest.raises(CommandFailed) as failed, naming_code(settings, "at step 7"):
        of_a_mesh()
    assert isinstance(failed.value.error, FunctionFailed) and "failed at step 7: KeyError" in str(failed.value.error)


def test_a_module_that_fails_when_it_is_imported_is_a_sentence(tmp_path: Path) -> None:
    for text, said in {  # noqa: F402
        "import fnmodels\nx = 1 / 0\n": "ZeroDivisionError: division by zero in bad.py, line 2",
        "x = 1\ndef f(:\n": "SyntaxError: invalid syntax in bad.py, line 2",
        "import nothing_of_this_name\n": "there is no module 'nothing_of_this_name'",
    }.items():
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(UserError, match=f"--family .*bad.py: .*{said}"):
            imported_family(str(tmp_path / "bad.py"))
        with pytest.raises(UserError, match=f"--loss .*bad.py:f: .*{said}"):
            _ = Imported(f"{tmp_path / 'bad.py'}:f", "--loss").function

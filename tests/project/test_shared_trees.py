"""Trees that tests share: one that a test has written to is found, and the next test gets it as it was."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forks import ROOT, Forks
from tests.support.shared_trees import SharedTrees

CONFTEST = """
from tests.support.shared_trees import Guard

def pytest_configure(config):
    config.pluginmanager.register(Guard())
"""
TESTS = """
import torch
from tests.support.shared_trees import SharedTrees

params = SharedTrees(lambda config, dtype: {"norm": torch.ones(3, dtype=dtype)})

def test_writes():
    params("a")["norm"].numpy()[1] = float("nan")

def test_reads():
    assert params("a")["norm"].sum() == 3
"""
WRITES: dict[str, Callable[[Any], Any]] = {
    "'layers.0.up' was written to": lambda params: params["layers"][0]["up"].mul_(1),  # its version alone
    "'norm' was written to, and 1 of its 3 elements are not finite": lambda params: (
        params["norm"].numpy().__setitem__(0, float("nan"))
    ),
    "'scale' was written to": lambda params: params["scale"].requires_grad_(),
    "'low' was written to": lambda params: params["low"].view(torch.int16).numpy().__setitem__((0, 1), 3),
    "'norm' was replaced or removed": lambda params: params.update(norm=params["norm"].clone()),
    "'scale' was replaced or removed": lambda params: params.pop("scale"),
    "'more' was added": lambda params: params.update(more=torch.ones(1)),
}


def made(config: Any, dtype: torch.dtype) -> Any:
    return {
        "layers": [{"up": torch.ones(2, 3, dtype=dtype)}],
        "norm": torch.ones(3, dtype=dtype),
        "scale": torch.ones((), dtype=dtype),
        "low": torch.ones(2, 2, dtype=torch.bfloat16),
        "empty": torch.ones(0, 2),
    }


@pytest.fixture
def trees() -> Iterator[SharedTrees]:
    every = SharedTrees(made)
    yield every
    SharedTrees.every.remove(every)


@pytest.mark.parametrize("sentence", WRITES)
def test_a_write_is_found_and_names_its_leaf(trees: SharedTrees, sentence: str) -> None:
    params = trees("tiny")
    assert trees("tiny") is params is trees("tiny", torch.float32) and trees("tiny", torch.float64) is not params
    assert trees.settle("test_before") == []
    WRITES[sentence](trees("tiny"))
    (found,) = trees.settle("test_that_writes")
    assert found == f"The shared tree of tiny in torch.float32 was changed: {sentence} by test_that_writes."
    assert trees("tiny") is not params and trees.settle("test_after") == []


def test_a_write_between_two_tests_is_found_by_the_second(trees: SharedTrees) -> None:
    params = trees("tiny")
    trees.settle("test_one")
    params["norm"].zero_()
    with pytest.raises(AssertionError, match=re.escape("'norm' was written to, after test_one had ended.")):
        trees("tiny")
    assert trees("tiny")["norm"].all()
    trees.settle("test_two")
    trees("tiny")["norm"].zero_()  # as by a module that keeps it
    trees.lent.clear()
    (found,) = trees.settle("test_last", last=True)
    assert found.endswith("'norm' was written to, after test_two had ended.") and not trees.kept


def test_a_test_that_writes_fails_and_the_next_one_does_not(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    for name, text in {
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = ['--import-mode=importlib']\n",
        "conftest.py": CONFTEST,
        "test_trees.py": TESTS,
    }.items():
        (tmp_path / name).write_text(text)
    done = forks.run(["-m", "pytest", "-q"], cwd=tmp_path)
    assert "2 passed, 1 error" in done.stdout and "ERROR test_trees.py::test_writes" in done.stdout, done.stdout
    assert "'norm' was written to, and 1 of its 3 elements are not finite by test_trees.py::test_writes" in done.stdout

"""What a small model executes beside thirty hand-written lines: aten operations are the same on every machine."""

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.forks import ROOT

# Operations of a layer over those of the hand-written layer of benchmarks/small_reference.py.
LIMITS = {"forward": 1.0, "step": 1.06, "grad": 1.04, "decode": 1.0}


@pytest.fixture(scope="module")
def small() -> Iterator[Any]:
    """benchmarks/small.py as a module."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("small")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.parametrize("task", LIMITS)
def test_a_layer_executes_few_operations_more_than_a_hand_written_one(task: str, small: Any) -> None:
    found: dict[str, list[int]] = {"hand-written": [], "fnmodels": []}
    for layers in (2, 4):
        at = small.Setting(small.Size(layers, 16, 2, 8))
        calls = small.MAKERS[task](at, False)
        for name, totals in found.items():
            totals.append(small.counts(calls[name])[2])
    per_layer = {name: (more - fewer) / 2 for name, (fewer, more) in found.items()}
    assert per_layer["fnmodels"] <= LIMITS[task] * per_layer["hand-written"], per_layer


def test_a_layer_calls_few_functions(small: Any) -> None:
    totals = []
    for layers in (2, 4):
        call = small.forwards(small.Setting(small.Size(layers, 16, 2, 8)), False)["fnmodels"]
        call()  # with what is computed once
        totals.append(small.counts(call)[0])
    assert (totals[1] - totals[0]) / 2 <= 69, totals  # calls of Python functions

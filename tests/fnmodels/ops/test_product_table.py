"""The measured rates of products: what they choose, the file that keeps them, and files that cannot be used."""

import fcntl
import itertools
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import fnmodels
from fnmodels import files
from fnmodels.ops.cpu import product_table as table

TORCH, ONEDNN, BF16 = (
    {f"{dtype} {name} {by}": 100.0 for name in table.FORMS.values()}
    for dtype, by in (("fp32", "torch"), ("fp32", "oneDNN"), ("bf16", "torch"))
)
ALL = dict.fromkeys(table.rate_names(), 100.0)  # of this machine
SURE, OTHER = table.Table(ALL, True), table.Table(dict.fromkeys(ALL, 200.0), True)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fnmodels"


def age(file: Path) -> None:
    """Makes the file ten minutes older."""
    os.utime(file, (time.time() - 600, time.time() - 600))


def test_candidates_are_products_of_their_form() -> None:
    runs = table.candidates()
    assert {name for name in runs if name.endswith("torch") and name.startswith("fp32")} == set(TORCH)
    for name, run in runs.items():
        want = runs[f"fp32 {name.split(' ', 1)[1].rpartition(' ')[0]} torch"]()
        assert run().dtype is (torch.bfloat16 if name.startswith("bf16") else torch.float32)
        assert (run() - want).norm() <= 1e-2 * want.norm()
    assert set(table.measured().gflops) == set(runs) == table.rate_names()


def test_the_faster_library_of_each_form() -> None:
    assert table.forms_of_onednn(TORCH) == frozenset()
    assert table.forms_of_onednn(TORCH | ONEDNN) == frozenset()  # equal: torch's own
    for form, name in table.FORMS.items():
        assert table.forms_of_onednn(TORCH | ONEDNN | {f"fp32 {name} oneDNN": 110.0}) == {form}


def test_widening_needs_a_gain_in_the_sum_of_the_forms() -> None:
    assert table.widening_gains(TORCH)  # no products in bf16
    assert not table.widening_gains(TORCH | BF16)
    assert table.widening_gains({name: 2 * rate for name, rate in TORCH.items()} | BF16)
    assert table.widening_gains(TORCH | {name: 2 * rate for name, rate in ONEDNN.items()} | BF16)
    one = {name: 2 * rate if "forward" in name else rate for name, rate in TORCH.items()}
    assert not table.widening_gains(one | BF16)  # 3 / (1 / 2 + 2) = 1.2
    assert not table.widening_gains({name: 1.2 * rate for name, rate in TORCH.items()} | BF16)


def test_the_first_file_decides_for_all(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = {"processor": "one"}
    monkeypatch.setattr(table, "measured", lambda: SURE)
    assert table.table_of(of) == SURE
    monkeypatch.setattr(table, "measured", lambda: OTHER)
    assert table.table_of(of) == SURE
    assert table.table_of({"processor": "another"}) == OTHER
    assert len(list(cache.iterdir())) == 2
    assert json.loads(table.table_file(of).read_text())["machine"] == of


def test_rates_that_no_second_turn_reached_are_measured_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = table.Table(ALL, False)
    monkeypatch.setattr(table, "measured", lambda: busy)
    assert table.table_of({}) == busy
    monkeypatch.setattr(table, "measured", lambda: OTHER)
    assert table.table_of({}) == busy  # processes that follow each other agree
    age(table.table_file({}))
    assert table.table_of({}) == OTHER == table.read(table.table_file({}))
    monkeypatch.setattr(table, "measured", lambda: busy)
    assert table.table_of({}) == OTHER


@pytest.mark.parametrize("before", [None, table.Table(ALL, False)], ids=["no file", "of a busy machine"])
def test_processes_that_start_together_measure_once(
    before: table.Table | None, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, calls = table.table_file({}), []

    def slow() -> table.Table:
        calls.append(time.sleep(0.5))
        return table.Table(ALL | {"fp32 forward torch": float(len(calls))}, False)

    if before is not None:
        table.write(file, {}, before)
        age(file)
    monkeypatch.setattr(table, "measured", slow)
    with ThreadPoolExecutor(3) as pool:  # each opens the folder itself, so that the lock parts threads too
        found = list(pool.map(table.table_of, [{}] * 3))
    assert len(calls) == 1
    assert found == [table.read(file)] * 3


def test_turns_that_lose_their_cores_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN has 110 GFLOP/s and torch 100, and other work takes most of the first turns of one of them."""
    seen = dict.fromkeys(("torch", "oneDNN"), 0)
    monkeypatch.setattr(table, "candidates", lambda: {name: name for name in seen})

    def rate(name: str) -> float:
        seen[name] += 1
        disturbed = name == "oneDNN" and seen[name] not in (5, 20)
        return {"torch": 100.0, "oneDNN": 110.0}[name] * (0.5 if disturbed else 1.0)

    monkeypatch.setattr(table, "_rate", rate)
    assert table.measured() == table.Table({"torch": 100.0, "oneDNN": 110.0}, True)
    assert seen == {"torch": 20, "oneDNN": 20}


def test_a_rate_reached_once_is_not_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = itertools.chain([100.0], itertools.repeat(50.0))
    monkeypatch.setattr(table, "candidates", lambda: {"torch": None})
    monkeypatch.setattr(table, "_rate", lambda run: next(rates))
    monkeypatch.setattr(table, "_SECONDS", 0.01)
    assert table.measured() == table.Table({"torch": 100.0}, False)


ONE = next(iter(ALL))
DAMAGED = {
    "empty": "",
    "cut": "{",
    "a list": "[]",
    "no rates": '{"gflops": 3}',
    "a text": json.dumps({"gflops": ALL | {ONE: "fast"}}),
    "a rate is missing": json.dumps({"gflops": {name: rate for name, rate in ALL.items() if name != ONE}}),
    "a rate too many": json.dumps({"gflops": ALL | {"fp32 backward torch": 1.0}}),
    "infinite": json.dumps({"gflops": ALL | {ONE: float("inf")}}),
    "nested": "[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_measured_anew(content: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = table.table_file({})
    file.parent.mkdir(parents=True)
    file.write_text(content)
    monkeypatch.setattr(table, "measured", lambda: SURE)
    assert table.table_of({}) == SURE == table.read(file)
    assert cache.stat().st_mode & 0o777 == 0o700


def test_a_lock_that_another_process_keeps_is_reported_and_then_passed_by(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir()
    monkeypatch.setattr(table, "measured", lambda: SURE)
    monkeypatch.setattr(table, "_SILENT_WAIT", 0.0)
    monkeypatch.setattr(table, "_LONGEST_WAIT", 0.1)
    handle = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.warns(UserWarning, match="Another process holds the lock of .*fnmodels"):
            assert table.table_of({}) == SURE
    finally:
        os.close(handle)
    assert not table.table_file({}).exists()


def test_what_killed_writers_left_is_removed_and_what_is_being_written_stays(cache: Path) -> None:
    old, new, held = (cache / f"{files.WRITING}{name}" for name in ("old", "new", "held"))
    for folder in (old, new, held):
        folder.mkdir(parents=True)
        (folder / "products.json").touch()
    age(old)
    age(held)
    handle = os.open(held, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        table.write(table.table_file({}), {}, SURE)
    finally:
        os.close(handle)
    assert {path.name for path in cache.iterdir()} == {new.name, held.name, table.table_file({}).name}


def test_without_a_folder_to_write_each_process_measures(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file instead of a folder")
    monkeypatch.setattr(table, "measured", lambda: SURE)
    assert table.table_of({}) == SURE


def test_explain_products_names_rates_choice_and_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RATES", TORCH | ONEDNN)
    monkeypatch.setattr(table, "ONEDNN", frozenset({(False, False)}))
    monkeypatch.setattr(table, "WIDENS", True)
    found = fnmodels.explain_products()
    assert found["fp32 forward"] == "torch 100 GFLOP/s, oneDNN 100 GFLOP/s: oneDNN"
    assert found["fp32 gradient of the input"].endswith(": torch")
    assert found["bf16 forward"] == "no instructions: fp32, by oneDNN"
    assert found["file"].removesuffix(table.BUSY).endswith(".json")
    monkeypatch.setattr(table, "CONFIRMED", False)
    assert fnmodels.explain_products()["file"].endswith(table.BUSY)


def test_compiled_code_measures_while_it_is_traced(cache: Path) -> None:
    """In a process of its own, whose first large product is inside of a graph."""
    code = """
import torch
from fnmodels.ops.linear import linear
x, w = torch.randn(256, 384).bfloat16(), torch.randn(320, 384).bfloat16()
y = torch.compile(linear, backend="aot_eager", fullgraph=True)(x, w)
torch.testing.assert_close(y, torch.nn.functional.linear(x, w), rtol=2e-2, atol=2e-1)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert len(list(cache.glob("products-*.json"))) == 1

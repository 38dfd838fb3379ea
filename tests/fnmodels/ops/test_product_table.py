"""The measured rates of products: what they choose, the file that keeps them, and files that cannot be used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fnmodels
from fnmodels.ops import product_table as table

TORCH, ONEDNN, BF16 = (
    {f"{dtype} {name} {by}": 100.0 for name in table.FORMS.values()}
    for dtype, by in (("fp32", "torch"), ("fp32", "oneDNN"), ("bf16", "torch"))
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fnmodels"


def test_candidates_are_products_of_their_form() -> None:
    runs = table.candidates()
    assert {name for name in runs if name.endswith("torch") and name.startswith("fp32")} == set(TORCH)
    for name, run in runs.items():
        want = runs[f"fp32 {name.split(' ', 1)[1].rpartition(' ')[0]} torch"]()
        assert run().dtype is (torch.bfloat16 if name.startswith("bf16") else torch.float32)
        assert (run() - want).norm() <= 1e-2 * want.norm()
    assert set(table.measured()) == set(runs)


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
    monkeypatch.setattr(table, "measured", lambda: TORCH)
    assert table.rates_of(of) == TORCH
    monkeypatch.setattr(table, "measured", lambda: TORCH | ONEDNN)
    assert table.rates_of(of) == TORCH
    assert table.rates_of({"processor": "another"}) == TORCH | ONEDNN
    assert len(list(cache.iterdir())) == 2
    # A process that measured at the same time, and lost.
    table._write(table.table_file(of), {"machine": of, "gflops": ONEDNN})
    assert table.rates_of(of) == TORCH
    assert json.loads(table.table_file(of).read_text())["machine"] == of


@pytest.mark.parametrize("content", ["", "{", "[]", '{"gflops": 3}', '{"gflops": {"fp32 forward torch": "fast"}}'])
def test_a_damaged_file_is_measured_anew(content: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = table.table_file({})
    file.parent.mkdir(parents=True)
    file.write_text(content)
    monkeypatch.setattr(table, "measured", lambda: TORCH)
    assert table.rates_of({}) == TORCH == table.read(file)


def test_without_a_folder_to_write_each_process_measures(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text("a file instead of a folder")
    monkeypatch.setattr(table, "measured", lambda: TORCH)
    assert table.rates_of({}) == TORCH


def test_explain_products_names_rates_choice_and_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RATES", TORCH | ONEDNN)
    monkeypatch.setattr(table, "ONEDNN", frozenset({(False, False)}))
    monkeypatch.setattr(table, "WIDENS", True)
    found = fnmodels.explain_products()
    assert found["fp32 forward"] == "torch 100 GFLOP/s, oneDNN 100 GFLOP/s: oneDNN"
    assert found["fp32 gradient of the input"].endswith(": torch")
    assert found["bf16 forward"] == "no instructions: fp32, by oneDNN"
    assert found["file"].endswith(".json")


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

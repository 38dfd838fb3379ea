"""The fast lane: what `-m "not slow"` leaves out by itself."""

import ast
import subprocess
import sys
from types import SimpleNamespace

from tests.support.forks import ROOT
from tests.support.lanes import FEW, FILE, MANY, chosen, cpu_seconds, recorded


def test_few_tests_of_a_function_are_all_kept() -> None:
    assert chosen([{}]) == {0}
    assert chosen([{"size": size} for size in range(FEW)]) == set(range(FEW))


def test_each_of_few_values_is_kept_and_some_of_many() -> None:
    names = [f"variant {number}" for number in range(20)] + ["gpt_oss", "llama"]
    tests = [
        {"case": SimpleNamespace(name=name), "kernel": kernel, "check": check}
        for check in range(MANY)
        for name in names
        for kernel in ("math", "sdpa")
    ]
    kept = [tests[number] for number in chosen(tests)]
    assert len(kept) < MANY + FEW and {test["check"] for test in kept} == set(range(MANY))
    assert {test["kernel"] for test in kept} == {"math", "sdpa"}
    assert {test["case"].name for test in kept} == {"llama"}
    assert len(chosen([{"case": test["case"]} for test in tests])) == FEW
    assert len(chosen([{"words": [number // 2]} for number in range(2 * FEW)])) == FEW  # of no hash, and equal in pairs


def test_every_function_that_is_listed_exists() -> None:
    listed, found = set(recorded(ROOT)), set[str]()
    for file in {name.partition("::")[0] for name in listed}:
        tree = ast.parse((ROOT / file).read_text()) if (ROOT / file).is_file() else ast.Module([], [])
        found |= {f"{file}::{node.name}" for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not listed - found, f"{FILE} lists tests that are gone: take their lines out, or record it anew"


def test_seconds_count_those_of_other_processes() -> None:
    before = cpu_seconds()
    subprocess.run([sys.executable, "-S", "-c", "sum(range(3_000_000))"], check=True)
    ended = cpu_seconds()
    running = subprocess.Popen(
        [sys.executable, "-S", "-c", "sum(range(3_000_000)); print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert running.stdout and running.stdout.readline()
    assert before + 0.02 < ended < cpu_seconds() - 0.02
    running.communicate(b"\n")

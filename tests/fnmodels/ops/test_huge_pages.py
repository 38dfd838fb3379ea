"""Tensors lie in pages of 2 MiB where they are asked to, with the same values at the same addresses."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import params as P
from fnmodels import llama, tree
from fnmodels.cache import compiled, init
from fnmodels.ops.cpu import huge_pages
from fnmodels.ops.cpu.huge_pages import PAGE, advise_huge_pages, move_to_huge_pages
from params import weight_forms

SMALL = llama.Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)
PROGRAM = """
import re, sys
import torch
from fnmodels.ops.cpu.huge_pages import PAGE, advise_huge_pages, move_to_huge_pages

def held(t):
    start, found, inside = t.data_ptr(), 0, False
    for line in open("/proc/self/smaps"):
        if address := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(text, 16) for text in address.groups())
            inside = low < start + t.nbytes and start < high
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    return found // PAGE

"""
WRITTEN = """
large = torch.arange(40 * PAGE // 8)  # above malloc's largest threshold, so that it is a mapping of its own
before, address = held(large), large.data_ptr()
moved = move_to_huge_pages([large, torch.ones(3), None, large[::2]])
assert moved >= 39, moved
assert held(large) - before >= 39, (before, held(large))
assert large.data_ptr() == address and torch.equal(large, torch.arange(40 * PAGE // 8))
assert move_to_huge_pages([large]) == moved  # again
"""
EMPTY = """
counts = []
for advised in (False, True):
    empty = torch.empty(40 * PAGE, dtype=torch.uint8)
    if advised:
        advise_huge_pages(empty)
    counts.append(held(empty.fill_(1)))
    del empty
assert counts[1] >= 39, counts
assert counts[0] == 0 or "[always]" in open("/sys/kernel/mm/transparent_hugepage/enabled").read(), counts
"""


@pytest.fixture
def pages() -> None:
    if huge_pages._madvise() is None or move_to_huge_pages([torch.zeros(4 * PAGE, dtype=torch.uint8)]) == 0:
        pytest.skip("this system has no huge pages")


@pytest.mark.parametrize("program", [WRITTEN, EMPTY], ids=["written", "empty"])
def test_memory_lies_in_huge_pages(program: str, pages: None) -> None:
    """In a process of its own, where mappings are those of one tensor."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr


def test_forms_of_weights_caches_and_compiled_steps_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[Tensor]] = {"move": [], "advise": []}
    move: Any = lambda tensors: asked["move"].extend(tensors)  # noqa: E731
    monkeypatch.setattr(weight_forms, "move_to_huge_pages", move)
    monkeypatch.setattr(compiled, "move_to_huge_pages", move)
    monkeypatch.setattr(init, "advise_huge_pages", asked["advise"].append)
    params = P.init(SMALL, seed=0)
    forms = P.packed(params)
    assert len(asked["move"]) == 8  # q, k, v, o, gate, up, down and the head
    P.quantize(params, SMALL, kind="int8")
    assert len(asked["move"]) > 14
    cache = fnmodels.init_cache(SMALL, 1, 8)
    assert [t.data_ptr() for t in asked["advise"]] == [t.data_ptr() for t in tree.leaves(cache.layers)]
    asked["move"].clear()
    step = fnmodels.compiled_step(SMALL)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(3):
            _, cache = step(forms, torch.ones(1, 1, dtype=torch.long), cache)
    assert len(asked["move"]) == len(tree.leaves(forms))  # once


def test_what_has_no_memory_here_is_left_alone() -> None:
    with torch.device("meta"):
        assert move_to_huge_pages([torch.empty(PAGE)]) == 0
    advise_huge_pages(torch.empty(PAGE, device="meta"))
    assert move_to_huge_pages([torch.eye(4).to_sparse(), "a leaf", torch.zeros(8)]) == 0
    batched = torch.vmap(lambda x: x + move_to_huge_pages([x]))(torch.zeros(2, PAGE))
    assert not batched.any()


def test_without_the_system_s_function_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_madvise", lambda: None)
    assert move_to_huge_pages([torch.zeros(PAGE)]) == 0
    advise_huge_pages(torch.zeros(PAGE))

"""Tensors lie in pages of 2 MiB where they are asked to, with the same values at the same addresses."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fnmodels
import params as P
from fnmodels import llama, tree
from fnmodels.ops import huge_pages
from fnmodels.ops.huge_pages import PAGE, advise_huge_pages, move_to_huge_pages
from fnmodels.ops.torch_internals import PRIVATE

WIDE = llama.Config(
    vocab_size=64,
    hidden_size=1024,
    intermediate_size=1536,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=8,
)


def held(start: int, length: int) -> int:
    """Bytes in huge pages, of the mappings that memory lies in."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if address := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(text, 16) for text in address.groups())
            inside = low < start + length and start < high
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1]) * 1024
    return found


def held_of(t: Tensor) -> int:
    return held(t.data_ptr(), t.nbytes)


@pytest.fixture
def pages() -> None:
    if huge_pages._madvise() is None or move_to_huge_pages([torch.zeros(4 * PAGE, dtype=torch.uint8)]) == 0:
        pytest.skip("this system has no huge pages")


def test_memory_that_is_written_moves_with_its_values(pages: None) -> None:
    large = torch.arange(40 * PAGE // 8)  # above malloc's largest threshold, so in a mapping that begins without them
    before, address = held_of(large), large.data_ptr()
    moved = move_to_huge_pages([large, torch.ones(3), None, large[::2]])
    assert moved >= 39
    assert held_of(large) - before >= 39 * PAGE
    assert large.data_ptr() == address and torch.equal(large, torch.arange(40 * PAGE // 8))
    assert move_to_huge_pages([large]) == moved  # again


def test_memory_that_is_not_written_is_in_huge_pages_from_the_start(pages: None) -> None:
    sizes = {}
    for advised in (False, True):
        empty = torch.empty(40 * PAGE, dtype=torch.uint8)
        before = held_of(empty)
        if advised:
            advise_huge_pages(empty)
        sizes[advised] = held_of(empty.fill_(1)) - before
        del empty
    assert sizes[True] >= 39 * PAGE
    always = "[always]" in huge_pages._SWITCH.read_text()
    assert always or sizes[False] == 0


def test_forms_of_weights_and_caches_lie_in_huge_pages(pages: None) -> None:
    params = P.init(WIDE, seed=0)
    layout = P.packed(params)["layers"][0]["mlp"]["down_proj"].layout
    assert held(PRIVATE["ops.mkldnn.data_ptr"](layout), layout.numel() * 4) >= PAGE
    cache = fnmodels.init_cache(WIDE, 1, 10 * PAGE // 4096)  # 4 KiB per slot
    assert held_of(cache.layers[0]["k"]) >= 9 * PAGE
    assert not any(leaf.any() for leaf in tree.leaves(cache.layers))


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

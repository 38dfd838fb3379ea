"""The choice of blocks by gated pools of index keys equals a loop; in packed rows it is each document's own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fnmodels.inputs import Causal
from fnmodels.inputs.mask import build_mask
from fnmodels.ops import indexer
from fnmodels.ops.indexer import Keys, keys_of
from fnmodels.ops.indexers import gated_pools
from fnmodels.ops.indexers.blocks import chosen_blocks
from fnmodels.ops.indexers.gated_pools import GatedPoolIndexer
from fnmodels.ops.invariant.rows import invariant_rows

HEADS, D, RANK, R, SIZE = 7, 6, 5, 4, 3
HOW = GatedPoolIndexer(count=2, size=SIZE, norm_eps=1e-2)
# the first document begins in the middle of a block
POSITIONS = torch.tensor([[4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0, 0]])
SEGMENTS = torch.tensor([[1] * 8 + [2] * 14 + [0] * 2])


def drawn(size: int = SIZE) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """(weights, x and what queries are projected from)."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"q_b_proj": (HEADS * R, RANK), "k_proj": (R, D), "k_norm": (R,), "k_norm_bias": (R,)}
    shapes |= {"weights_proj": (HEADS, D), "pool_gate": (R, D), "pool_bias": (size, R)}
    weights = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    x, latent = (torch.randn(1, POSITIONS.shape[1], width, generator=generator).double() for width in (D, RANK))
    return weights, (x, latent)


def chosen(weights: dict[str, Tensor], x: tuple[Tensor, Tensor], keys: Keys, how: GatedPoolIndexer = HOW) -> Tensor:
    return how.choose(weights, x, how.index(weights, x, None), None, keys)


def by_loops(weights: dict[str, Tensor], given: tuple[Tensor, Tensor], how: GatedPoolIndexer = HOW) -> list[set[int]]:
    """The names of the blocks that each token chooses, those of both ends of what it sees among them."""
    x, latent = given[0][0], given[1][0]
    k = x @ weights["k_proj"].T
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, keepdim=True, correction=0) + how.norm_eps).sqrt()
    k, found = k * weights["k_norm"] + weights["k_norm_bias"], []
    for t in range(len(x)):
        blocks: dict[int, list[int]] = {}
        for u in range(len(x)):
            if SEGMENTS[0, u] == SEGMENTS[0, t] > 0 and POSITIONS[0, u] <= POSITIONS[0, t]:
                blocks.setdefault(int(POSITIONS[0, u]) // how.size, []).append(u)
        scores = {}
        for block, tokens in blocks.items():
            if len(tokens) == how.size:
                share = (x[tokens] @ weights["pool_gate"].T + weights["pool_bias"]).softmax(0)
                key, q = (share * k[tokens]).sum(0), (latent[t] @ weights["q_b_proj"].T).view(HEADS, R)
                scores[block] = float((weights["weights_proj"] @ x[t]) @ (q @ key).relu())
        best = sorted(scores, key=lambda block, scores=scores: (-scores[block], -block))[: how.count]
        ends = {min(blocks), max(blocks)} if blocks else set()
        found.append({*best, *(block for block in ends if block not in scores)})
    return found


@pytest.mark.parametrize("how", [HOW, replace(HOW, count=1), replace(HOW, size=1, count=3)])
@pytest.mark.parametrize("most", [1, 1 << 24])
def test_gated_choice_equals_a_loop(how: GatedPoolIndexer, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_MOST", most)
    weights, x = drawn(how.size)
    keys = keys_of(build_mask(Causal(), POSITIONS, SEGMENTS))
    got, want = chosen(weights, x, keys, how), by_loops(weights, x, how)
    assert got.shape[-1] == how.count + 2
    assert [{int(n) for n in names if n >= 0} for names in got[0]] == want
    with invariant_rows(True):
        assert torch.equal(chosen(weights, x, keys, how), got)
    mask, seen = chosen_blocks(keys, got, 1, how.size)[0, 0], keys.allowed()[0]
    assert mask.equal(torch.stack([torch.isin(POSITIONS[0] // how.size, got[0, t]) for t in range(24)]) & seen)


def test_gated_choice_of_a_packed_row_is_each_documents_own() -> None:
    weights, x = drawn()
    packed = chosen(weights, x, keys_of(build_mask(Causal(), POSITIONS, SEGMENTS)))
    for begin, end in ((0, 8), (8, 22)):
        own = POSITIONS[:, begin:end]
        keys = keys_of(build_mask(Causal(), own, torch.ones_like(own)))
        assert torch.equal(chosen(weights, (x[0][:, begin:end], x[1][:, begin:end]), keys), packed[:, begin:end])
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    keys = keys_of(build_mask(Causal(), POSITIONS[:, order], SEGMENTS[:, order]))
    assert torch.equal(chosen(weights, (x[0][:, order], x[1][:, order]), keys), packed[:, order])


def without_documents(right: Any) -> Any:
    return lambda keys, size: right(replace(keys, segments=keys.segments.clamp(max=1)), size)


def of_the_row(right: Any) -> Any:
    return lambda keys, size: right(replace(keys, positions=torch.arange(keys.positions.shape[1])[None]), size)


@pytest.mark.parametrize("wrong", [without_documents, of_the_row])
def test_gated_choice_planted_bugs_are_found(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pools across documents, and pools counted along the row."""
    monkeypatch.setattr(gated_pools, "blocks_of", wrong(gated_pools.blocks_of))
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        test_gated_choice_equals_a_loop(HOW, 1 << 24, monkeypatch)


def test_gated_choice_planted_bug_of_places_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias of the place before."""
    weights, x = drawn()
    keys = keys_of(build_mask(Causal(), POSITIONS, SEGMENTS))
    moved = weights | {"pool_bias": weights["pool_bias"].roll(1, 0)}
    assert [{int(n) for n in names if n >= 0} for names in chosen(moved, x, keys)[0]] != by_loops(weights, x)

"""The choice of blocks by pooled keys equals a loop over blocks; in packed rows it is each document's own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fnmodels.inputs import Causal
from fnmodels.inputs.mask import build_mask
from fnmodels.ops import indexer
from fnmodels.ops.indexer import Keys, keys_of
from fnmodels.ops.indexers import pooled
from fnmodels.ops.indexers.blocks import chosen_blocks
from fnmodels.ops.indexers.pooled import PooledIndexer
from fnmodels.ops.invariant.rows import invariant_rows

HEADS, D, R, SIZE = 4, 6, 4, 3


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """x [B, S, N, R] plus what its table says, so that a wrong position shows."""
    return x + table.flatten(2).unsqueeze(2)


HOW = PooledIndexer(count=2, size=SIZE, eps=1e-2, rotate=rotate)
POSITIONS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0, 0]])
SEGMENTS = torch.tensor([[1] * 8 + [2] * 14 + [0] * 2])


def table(positions: Tensor) -> Tensor:
    return torch.stack([(positions.double() * (i + 1)).sin() for i in range(R)], -1).unflatten(-1, (-1, 2))


def drawn() -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"q_proj": (HEADS * R, D), "k_proj": (R, D), "q_scale": (R,), "k_scale": (R,)}
    weights = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return weights, torch.randn(1, POSITIONS.shape[1], D, generator=generator, dtype=torch.float64)


def chosen(weights: dict[str, Tensor], x: Tensor, keys: Keys, positions: Tensor, how: PooledIndexer = HOW) -> Tensor:
    freqs = {"table": table(positions), "start": table(positions - positions % how.size)}
    return how.choose(weights, x, how.index(weights, x, freqs), freqs, keys)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + HOW.eps).sqrt() * (1 + weight)


def by_loops(weights: dict[str, Tensor], x: Tensor, how: PooledIndexer = HOW) -> list[set[int]]:
    """The names of the blocks that each token chooses, its last one among them while it is not complete."""
    k, found = x[0] @ weights["k_proj"].T, []
    q = normed((x[0] @ weights["q_proj"].T).view(-1, HEADS, R), weights["q_scale"]) + table(POSITIONS)[0].view(-1, 1, R)
    for t in range(len(k)):
        blocks: dict[int, list[int]] = {}
        for u in range(len(k)):
            if SEGMENTS[0, u] == SEGMENTS[0, t] > 0 and POSITIONS[0, u] <= POSITIONS[0, t]:
                blocks.setdefault(int(POSITIONS[0, u]) // how.size, []).append(u)
        scores = {}
        for block, tokens in blocks.items():
            if len(tokens) == how.size:
                key = normed(k[tokens].mean(0), weights["k_scale"]) + table(torch.tensor(block * how.size)).flatten()
                scores[block] = float((q[t] @ key).relu().sum())
        best = sorted(scores, key=lambda block, scores=scores: (-scores[block], -block))[: how.count]
        ends = {min(blocks), max(blocks)} if blocks else set()
        found.append({*best, *(block for block in ends if block not in scores)})
    return found


@pytest.mark.parametrize("how", [HOW, replace(HOW, count=1), replace(HOW, size=1, count=3)])
@pytest.mark.parametrize("most", [1, 1 << 24])
def test_pooled_choice_equals_a_loop(how: PooledIndexer, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_MOST", most)
    weights, x = drawn()
    keys = keys_of(build_mask(Causal(), POSITIONS, SEGMENTS))
    got, want = chosen(weights, x, keys, POSITIONS, how), by_loops(weights, x, how)
    assert got.shape[-1] == how.count + 2
    assert [{int(n) for n in names if n >= 0} for names in got[0]] == want
    with invariant_rows(True):
        assert torch.equal(chosen(weights, x, keys, POSITIONS, how), got)
    mask = chosen_blocks(keys, got, 1, how.size)[0, 0]
    seen = keys.allowed()[0]
    assert mask.equal(torch.stack([torch.isin(POSITIONS[0] // how.size, got[0, t]) for t in range(24)]) & seen)


def test_pooled_choice_of_a_packed_row_is_each_documents_own() -> None:
    weights, x = drawn()
    packed = chosen(weights, x, keys_of(build_mask(Causal(), POSITIONS, SEGMENTS)), POSITIONS)
    for begin, end in ((0, 8), (8, 22)):
        own = POSITIONS[:, begin:end]
        keys = keys_of(build_mask(Causal(), own, torch.ones_like(own)))
        assert torch.equal(chosen(weights, x[:, begin:end], keys, own), packed[:, begin:end])
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    keys = keys_of(build_mask(Causal(), POSITIONS[:, order], SEGMENTS[:, order]))
    assert torch.equal(chosen(weights, x[:, order], keys, POSITIONS[:, order]), packed[:, order])


def without_documents(right: Any) -> Any:
    return lambda keys, size: right(replace(keys, segments=keys.segments.clamp(max=1)), size)


def of_the_row(right: Any) -> Any:
    return lambda keys, size: right(replace(keys, positions=torch.arange(keys.positions.shape[1])[None]), size)


@pytest.mark.parametrize("wrong", [without_documents, of_the_row])
def test_pooled_choice_planted_bugs_are_found(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks across documents, and blocks counted along the row."""
    monkeypatch.setattr(pooled, "blocks_of", wrong(pooled.blocks_of))
    with pytest.raises((AssertionError, RuntimeError, IndexError)):
        test_pooled_choice_equals_a_loop(HOW, 1 << 24, monkeypatch)

"""The choice of blocks equals a loop over blocks, for each head of keys; in packed rows it is each document's own."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fnmodels.inputs import Causal
from fnmodels.inputs.mask import build_mask
from fnmodels.ops import indexer
from fnmodels.ops.attention.select import attention
from fnmodels.ops.indexer import Keys, keys_of
from fnmodels.ops.indexers import blocks as block_choice
from fnmodels.ops.indexers.blocks import BlockIndexer, choose_blocks, chosen_blocks, places_in_blocks
from fnmodels.ops.invariant.rows import invariant_rows

G, D, R, SIZE = 2, 6, 5, 3
HOW = BlockIndexer(count=3, local=1, size=SIZE, eps=1e-2, rotate=lambda x, _: x)
POSITIONS = torch.tensor([[3, 4, 5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 0, 0]])
SEGMENTS = torch.tensor([[1] * 8 + [2] * 14 + [0] * 2])


def drawn(seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q_proj": (G * R, D), "k_proj": (R, D), "q_norm": (R,), "k_norm": (R,)}
    weights = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return weights, torch.randn(1, POSITIONS.shape[1], D, generator=generator, dtype=torch.float64)


def chosen(weights: dict[str, Tensor], x: Tensor, keys: Keys, how: BlockIndexer = HOW) -> Tensor:
    k = block_choice.index_keys(weights, x, x, how)
    return choose_blocks(weights, x, k, x, keys, how)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + HOW.eps).sqrt() * (1 + weight)


def by_loops(weights: dict[str, Tensor], x: Tensor, how: BlockIndexer) -> list[list[set[int]]]:
    """[head][query]: the names of the chosen blocks."""
    k = normed(x[0] @ weights["k_proj"].T, weights["k_norm"])
    q = normed((x[0] @ weights["q_proj"].T).view(-1, G, R), weights["q_norm"])
    found: list[list[set[int]]] = [[] for _ in range(G)]
    for g in range(G):
        for t in range(len(k)):
            best: dict[int, float] = {}
            for u in range(len(k)):
                if SEGMENTS[0, u] == SEGMENTS[0, t] > 0 and POSITIONS[0, u] <= POSITIONS[0, t]:
                    block = int(POSITIONS[0, u]) // how.size
                    best[block] = max(best.get(block, -torch.inf), float(q[t, g] @ k[u]))
            own = int(POSITIONS[0, t]) // how.size
            near = [block for block in best if own - how.local < block <= own]
            far = sorted(best.keys() - set(near), key=lambda block: -best[block])
            found[g].append(set((near + far)[: how.count]))
    return found


@pytest.mark.parametrize("how", [HOW, replace(HOW, local=2), replace(HOW, count=1), replace(HOW, size=1, count=5)])
@pytest.mark.parametrize("most", [1, 1 << 24])
def test_block_choice_equals_a_loop(how: BlockIndexer, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexer, "_MOST", most)
    weights, x = drawn()
    keys = keys_of(build_mask(Causal(), POSITIONS, SEGMENTS))
    got, want = chosen(weights, x, keys, how).unflatten(-1, (G, how.count)), by_loops(weights, x, how)
    assert [[{int(n) for n in names if n >= 0} for names in got[0, :, g]] for g in range(G)] == want
    with invariant_rows(True):
        assert torch.equal(chosen(weights, x, keys, how).unflatten(-1, (G, how.count)), got)
    assert by_loops(weights, x, replace(how, local=how.local + 1)) != want or how.count == how.local


def test_block_choice_masks_and_places_are_the_blocks_keys() -> None:
    """Of a dense mask and of a Mask; kernel="sparse" gathers for each head of keys what a mask shows it."""
    weights, x = drawn()
    mask = build_mask(Causal(), POSITIONS, SEGMENTS)
    keys = keys_of(mask)
    choices = chosen(weights, x, keys)
    dense = chosen_blocks(keys, choices, G, SIZE)
    names = choices.unflatten(-1, (G, -1))
    blocks = (POSITIONS // SIZE)[0]
    want = (names[0, :, :, :, None] == blocks).any(2).transpose(0, 1) & mask.dense()[0]
    assert torch.equal(dense[0], want) and not torch.equal(dense[0, 0], dense[0, 1])
    places = places_in_blocks(keys, choices, G, SIZE)
    assert torch.equal(places.dense(), dense) and places.shape == dense.shape
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 24, n, 4, generator=generator, dtype=torch.float64) for n in (6, G, G))
    q, sinks = q.requires_grad_(), torch.randn(6, generator=generator, dtype=torch.float64)
    for more in ({}, {"sinks": sinks}, {"softcap": 2.0}):
        by_mask = attention(q, k, v, places, kernel="math", scale=0.5, **more)
        gathered = attention(q, k, v, places, kernel="sparse", scale=0.5, **more)
        torch.testing.assert_close(gathered, by_mask)
        grads = (torch.autograd.grad(out.square().sum(), q)[0] for out in (gathered, by_mask))
        torch.testing.assert_close(*grads)
    with pytest.raises(ValueError, match="make it of this batch"):
        attention(q, k[:, :, :1], v[:, :, :1], places, kernel="sparse", scale=0.5)


def test_block_choice_follows_the_tokens() -> None:
    """In another order of the tokens, and where a document is alone, from its first position or a later one."""
    weights, x = drawn()
    choices = chosen(weights, x, keys_of(build_mask(Causal(), POSITIONS, SEGMENTS)))
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    moved = build_mask(Causal(), POSITIONS[:, order], SEGMENTS[:, order])
    assert torch.equal(chosen(weights, x[:, order], keys_of(moved)), choices[:, order])
    for part in (slice(0, 8), slice(8, 22)):
        alone = build_mask(Causal(), POSITIONS[:, part], torch.ones_like(SEGMENTS[:, part]))
        assert torch.equal(chosen(weights, x[:, part], keys_of(alone)), choices[:, part])
    mixed = build_mask(Causal(), POSITIONS, SEGMENTS.clamp(min=1, max=1))  # a planted bug: documents joined
    assert not torch.equal(chosen(weights, x, keys_of(mixed)), choices)


def test_block_choice_under_vmap_is_that_of_each_row() -> None:
    weights, x = drawn()
    rows = torch.stack((x[0], drawn(1)[1][0]))
    mask = build_mask(Causal(), POSITIONS, SEGMENTS)

    def one(row: Tensor) -> Any:
        return chosen(weights, row[None], keys_of(mask))[0]

    assert torch.equal(torch.vmap(one)(rows), torch.stack([one(row) for row in rows]))


def test_block_choice_is_none_where_every_block_is_seen() -> None:
    assert [HOW.chooses_among(keys) for keys in (7, 8)] == [False, True]  # 8 keys from position 2 on have 4 blocks

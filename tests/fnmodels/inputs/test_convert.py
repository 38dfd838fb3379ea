"""BlockMasks compared with torch's own `create_block_mask`, and how much of the predicate is evaluated."""

import dataclasses

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fnmodels
from fnmodels.inputs import block_mask
from fnmodels.ops.attention.select import attention
from fnmodels.ops.indexer import keys_of
from fnmodels.ops.indexers.blocks import places_in_blocks


@dataclasses.dataclass(frozen=True)
class Odd(fnmodels.inputs.Rule):
    """A rule without bounds: the defaults of `Rule`."""

    def __call__(self, q, kv):
        return (q.positions * kv.positions) % 3 > 0


RULES = {
    "causal": fnmodels.inputs.Causal(),
    "window": fnmodels.inputs.Causal() & fnmodels.inputs.Window(150),
    "chunk": fnmodels.inputs.Causal() & fnmodels.inputs.Chunk(256),
    "both ways": fnmodels.inputs.BidirectionalWindow(140) | fnmodels.inputs.Chunk(70),
    "encoder": fnmodels.inputs.Everything(),
    "images": fnmodels.inputs.Causal() | fnmodels.inputs.SameSpan(),
    "odd": Odd(),
}
S = 700  # six tiles, the last one incomplete


def same(mask, batch):
    queries, keys = mask.q_positions.shape[1], mask.kv_positions.shape[1]
    created = create_block_mask(mask.mask_mod(), batch, None, queries, keys, device="cpu")
    for one, other in zip(fnmodels.inputs.to_block_mask(mask).as_tuple(), created.as_tuple(), strict=True):
        assert one.equal(other) if isinstance(one, torch.Tensor) else callable(one) or one == other


@pytest.mark.parametrize("name", RULES)
def test_a_block_mask_is_what_torch_makes(name, monkeypatch):
    """Packed rows: permuted, with padding inside, with fewer queries than keys, and one row expanded to all."""
    segments = fnmodels.segments_from_lengths([[300, 3, 140, 200], [S], []], S)
    segments[1, 250:420] = -1
    positions = fnmodels.positions_from_segments(segments, start=torch.tensor([5, 0, 0]))
    spans = torch.arange(S).expand(3, S) // 90 % 3
    mask = fnmodels.inputs.build_mask(RULES[name], positions, segments, spans=spans)
    order = torch.randperm(S, generator=torch.Generator().manual_seed(0))
    row = fnmodels.inputs.build_mask(RULES[name], positions[:1], segments[:1], spans=spans[:1])
    expanded = fnmodels.inputs.build_mask(
        RULES[name], *(t[:1].expand(3, S) for t in (positions, segments)), spans=spans[:1]
    )
    for one in (mask, fnmodels.permute(mask, order), mask.select(slice(300, 500), slice(None)), expanded):
        same(one, 3)
        looked_at = block_mask._tiles_by_evaluation(one)
        assert all(a.equal(b) for a, b in zip(block_mask._tiles_by_bounds(one), looked_at, strict=True))
    same(row, 1)


@pytest.mark.parametrize("name", ["causal", "window", "chunk"])
def test_the_predicate_is_looked_at_on_the_edges_only(name, monkeypatch):
    looked, allowed = [], fnmodels.inputs.Mask.allowed
    monkeypatch.setattr(fnmodels.inputs.Mask, "allowed", lambda *how: looked.append(out := allowed(*how)) or out)
    for length in (4096, 16384):
        looked.clear()
        positions = torch.arange(length)[None]
        made = fnmodels.inputs.to_block_mask(
            fnmodels.inputs.build_mask(RULES[name], positions, torch.ones_like(positions))
        )
        assert sum(out.numel() for out in looked) <= 4 * block_mask.TILE * length
        tiles = length // block_mask.TILE
        if name == "causal":
            assert made.full_kv_num_blocks.flatten().tolist() == list(range(tiles))
            assert made.kv_num_blocks.flatten().tolist() == [1] * tiles


def test_a_mask_of_nothing_is_refused():
    positions = torch.arange(5)[None]
    mask = fnmodels.inputs.build_mask(fnmodels.inputs.Causal(), positions, torch.ones_like(positions))
    for part, words in (
        (mask.select(slice(None), slice(0)), "5 and 0"),
        (mask.select(slice(0), slice(None)), "0 and 5"),
    ):
        with pytest.raises(ValueError, match=f"a query and a key at least, this mask has {words}"):
            fnmodels.inputs.to_block_mask(part)


def test_a_block_mask_of_chosen_blocks_has_their_tiles_alone():
    """What kernel="flex" reads of a choice by head of keys: the tiles that no query chose are left out."""
    generator = torch.Generator().manual_seed(0)
    names = torch.rand(2, 300, 2 * 6, generator=generator).unflatten(-1, (2, 6)).topk(2, -1).indices.flatten(2)
    names[:, :128] = names[:, :1]  # a tile of queries that chose alike
    positions, ids = torch.arange(700)[None], torch.ones(1, 700, dtype=torch.int64)
    mask = fnmodels.inputs.build_mask(fnmodels.inputs.Everything(), positions, ids).select(slice(0, 300), slice(None))
    choice = places_in_blocks(keys_of(mask), names, 2, block_mask.TILE)
    seen = choice.dense()
    made = fnmodels.inputs.to_block_mask(seen)
    created = create_block_mask(lambda b, h, q, k: seen[b, h, q, k], 2, 2, 300, 700, device="cpu")
    for one, other in zip(made.as_tuple(), created.as_tuple(), strict=True):
        assert one.equal(other) if isinstance(one, torch.Tensor) else callable(one) or one == other
    touched = (made.kv_num_blocks + made.full_kv_num_blocks)[:, :, 0]
    assert (touched == 2).all() and fnmodels.inputs.to_dense(made).equal(seen)
    q, k, v = (
        torch.randn(2, length, heads, 16, generator=generator) for length, heads in ((300, 4), (700, 2), (700, 2))
    )
    out = flex_attention(*(t.transpose(1, 2) for t in (q, k, v)), block_mask=_by_query_head(seen), enable_gqa=True)
    wanted = attention(q, k, v, choice, kernel="math", scale=0.25)
    assert (out.transpose(1, 2) - wanted).abs().max() < 1e-5
    with pytest.raises(ValueError, match="not of a str"):
        fnmodels.inputs.to_block_mask("causal")


def _by_query_head(seen):
    return fnmodels.inputs.to_block_mask(seen.repeat_interleave(2, dim=1))


@pytest.mark.parametrize("mask", [torch.zeros(1, 1, 4, 4), torch.ones(4, 4, dtype=torch.bool)], ids=["float", "flat"])
def test_tensors_that_are_no_masks_are_refused(mask: torch.Tensor) -> None:
    with pytest.raises(
        ValueError, match=r"a bool tensor \[B or 1, N or 1, Q, K\], True where a query sees a key; this"
    ):
        fnmodels.inputs.to_block_mask(mask)

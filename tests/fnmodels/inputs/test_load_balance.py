"""Load-balancing orders for context parallelism: permutations, their inverses, and the balance that they reach."""

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

import fnmodels
from fnmodels.inputs.load_balance import (
    balance,
    balanced_order,
    head_tail_order,
    imbalance,
    inverse_order,
    visible_keys,
)

RANKS, LENGTH = 4, 256


def packed(lengths: list[int], rule: fnmodels.inputs.Rule) -> fnmodels.inputs.Mask:
    segments = fnmodels.segments_from_lengths([lengths], LENGTH)
    return fnmodels.inputs.build_mask(rule, fnmodels.positions_from_segments(segments), segments)


MASKS = {
    "causal": packed([LENGTH], fnmodels.inputs.Causal()),
    "packed": packed([100, 30, 3, 60, 1, 40], fnmodels.inputs.Causal()),
    "sliding": packed([LENGTH], fnmodels.inputs.Causal() & fnmodels.inputs.Window(16)),
}


def test_head_tail_splits_one_triangle_evenly():
    order = head_tail_order(8, 2)
    assert order.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert imbalance(MASKS["causal"], RANKS, head_tail_order(LENGTH, RANKS)) == 1.0
    # contiguous shards: rank 3 of 4 has (256^2 - 192^2) of 256^2 pairs, four times its fair quarter of 1
    assert imbalance(MASKS["causal"], RANKS) == pytest.approx(4 * (1 - (3 / 4) ** 2), rel=1e-2)


@pytest.mark.parametrize("name", MASKS)
def test_balanced_order_is_a_permutation_and_more_even(name):
    mask = MASKS[name]
    order = balanced_order(mask, RANKS, block=8)
    assert order.sort(dim=1).values.tolist() == [list(range(LENGTH))]
    assert fnmodels.permute(fnmodels.permute(order, order), inverse_order(order)).equal(order)
    even = imbalance(mask, RANKS, order)
    assert even <= 1.05 and even <= imbalance(mask, RANKS)


def test_head_tail_does_not_see_documents():
    assert imbalance(MASKS["packed"], RANKS, head_tail_order(LENGTH, RANKS)) > 1.1


@dataclasses.dataclass(frozen=True)
class Odd(fnmodels.inputs.Rule):
    """A rule without bounds: the defaults of `Rule`."""

    def __call__(self, q, kv):
        return (q.positions * kv.positions) % 3 > 0


RULES = {
    "causal": fnmodels.inputs.Causal(),
    "window": fnmodels.inputs.Causal() & fnmodels.inputs.Window(9),
    "chunk": fnmodels.inputs.Causal() & fnmodels.inputs.Chunk(16),
    "both ways": fnmodels.inputs.BidirectionalWindow(5) | fnmodels.inputs.Chunk(7),
    "encoder": fnmodels.inputs.Everything(),
    "images": fnmodels.inputs.Causal() | fnmodels.inputs.SameSpan(),
    "odd": Odd(),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("piece", [(256, 1024), (4, 16), (1, 1)])
def test_visible_keys_counts_the_dense_mask(name, piece, monkeypatch):
    """In text order, permuted, with gaps between positions, and with fewer queries than keys."""
    monkeypatch.setattr(sys.modules["fnmodels.inputs.load_balance"], "_PIECE", piece)
    segments = fnmodels.segments_from_lengths([[40, 3, 1, 16], [60], []], 64)
    positions = fnmodels.positions_from_segments(segments, start=torch.tensor([5, 0, 0]))
    positions = positions * torch.tensor([[1], [3], [1]])
    spans = torch.randint(0, 3, (3, 64), generator=torch.Generator().manual_seed(0))
    mask = fnmodels.inputs.build_mask(RULES[name], positions, segments, spans=spans)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    for one in (mask, fnmodels.permute(mask, order), mask.select(slice(30, 50), slice(None))):
        assert visible_keys(one).equal(one.dense()[:, 0].sum(-1))
    row = fnmodels.inputs.build_mask(
        RULES[name], positions[:1], segments, spans=spans[1:2]
    )  # one row of positions for all
    assert visible_keys(row).equal(row.dense()[:, 0].sum(-1))
    assert visible_keys(mask.select(slice(0), slice(None))).shape == (3, 0)


@pytest.mark.parametrize("rule", ["causal", "window", "chunk"])
def test_visible_keys_looks_at_a_number_of_pairs_linear_in_the_sequence(rule, monkeypatch):
    looked = []
    dense = fnmodels.inputs.Mask.dense
    monkeypatch.setattr(fnmodels.inputs.Mask, "dense", lambda self: looked.append(out := dense(self)) or out)
    for length in (8192, 32768):
        looked.clear()
        positions = torch.arange(length)[None]
        counts = visible_keys(fnmodels.inputs.build_mask(RULES[rule], positions, torch.ones_like(positions)))
        want = {"causal": positions + 1, "window": (positions + 1).clamp(max=9), "chunk": positions % 16 + 1}[rule]
        assert counts.equal(want)
        assert sum(out.numel() for out in looked) <= 2048 * length


@pytest.mark.parametrize("method", ["mask", "head_tail"])
def test_balance_reorders_a_whole_batch_and_says_how_to_undo_it(method):
    mask = MASKS["packed"]
    batch = {"positions": mask.q_positions, "masks": {"full": mask}}
    moved, back = balance(batch, mask, RANKS, method=method, block=8)
    assert not moved["positions"].equal(batch["positions"])
    assert moved["masks"]["full"].kv_segments.equal(fnmodels.permute(mask.kv_segments, inverse_order(back)))
    assert fnmodels.permute(moved, back)["masks"]["full"].q_positions.equal(mask.q_positions)


def test_rows_get_orders_of_their_own():
    segments = fnmodels.segments_from_lengths([[LENGTH], [128, 128]], LENGTH)
    mask = fnmodels.inputs.build_mask(fnmodels.inputs.Causal(), fnmodels.positions_from_segments(segments), segments)
    order = balanced_order(mask, RANKS, block=8)
    assert order.shape == (2, LENGTH) and not order[0].equal(order[1])


def test_lengths_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="divisible by 6, not 8"):
        head_tail_order(8, 3)
    with pytest.raises(ValueError, match="divisible by 384, not 256"):
        balanced_order(MASKS["causal"], 3)


@pytest.mark.parametrize("method", ["mask", "head_tail"])
def test_a_mask_that_is_one_for_all_rows_orders_all_rows(method):
    mask = MASKS["packed"]
    tokens = torch.arange(4 * LENGTH).view(4, LENGTH)
    (moved, ordered), back = balance((tokens, mask), mask, RANKS, method=method, block=8)
    assert moved.equal(tokens[:, inverse_order(back).flatten()]) and not moved.equal(tokens)
    assert fnmodels.permute(moved, back).equal(tokens)
    assert ordered.q_positions.shape == (1, LENGTH)
    order = inverse_order(back)
    assert imbalance(mask, RANKS, order) == imbalance(mask, RANKS, order.flatten().expand(4, -1))


def test_sizes_that_cannot_be_are_refused():
    mask, batch = MASKS["causal"], {"tokens": torch.zeros(2, LENGTH)}
    for call in (
        lambda ranks: balance(batch, mask, ranks),
        lambda ranks: balance(batch, mask, ranks, method="head_tail"),
        lambda ranks: head_tail_order(LENGTH, ranks),
        lambda ranks: balanced_order(mask, ranks),
        lambda ranks: imbalance(mask, ranks),
    ):
        for ranks in (0, -2):
            with pytest.raises(ValueError, match=f"ranks is {ranks}"):
                call(ranks)
    with pytest.raises(ValueError, match="block is 0"):
        balance(batch, mask, 2, block=0)
    with pytest.raises(ValueError, match="3 equal shares need a length divisible by 3, not 256"):
        imbalance(mask, 3)
    with pytest.raises(ValueError, match=r"The order is \[1, 8\], and the mask has \[1, 256\]"):
        imbalance(mask, 2, torch.arange(8))
    with pytest.raises(TypeError, match="not on a Tensor"):
        balance(batch, mask.dense(), 2)


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        (torch.zeros(5, dtype=torch.long), "has each number below that once"),
        (torch.tensor([0, 1, 2, 3, 5]), "has each number below that once"),
        (torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 3, 3]]), "has each number below that once"),
        (torch.arange(5.0), "of int64, not .5. of torch.float32"),
        (torch.tensor(0), "of int64, not .. of torch.int64"),
        (torch.arange(5).expand(3, 5), "'tokens' of 2 rows: the order is of 3"),
    ],
)
def test_what_is_no_permutation_is_refused(order, sentence):
    with pytest.raises(ValueError, match=sentence):
        fnmodels.permute({"tokens": torch.zeros(2, 5)}, order)


# Measured for the docs, on training rows: load of the busiest rank over the mean load.
DOCS = Path(__file__).parents[3] / "docs" / "positions-and-masks.md"
MEASURED = {
    "causal, 8,192 tokens": ([8192], fnmodels.inputs.Causal()),
    "packed, 8,192 tokens in 8 documents": ([3500, 120, 900, 40, 2000, 700, 300, 632], fnmodels.inputs.Causal()),
    "sliding window 512, 8,192 tokens": ([8192], fnmodels.inputs.Causal() & fnmodels.inputs.Window(512)),
}


def measured(lengths, rule, ranks):
    """Imbalance in text order, in head-tail order, and in the order made from the mask."""
    segments = fnmodels.segments_from_lengths([lengths])
    mask = fnmodels.inputs.build_mask(rule, fnmodels.positions_from_segments(segments), segments)
    orders = (None, head_tail_order(mask.q_positions.shape[1], ranks), balanced_order(mask, ranks))
    return [imbalance(mask, ranks, order) for order in orders]


def table():
    lines = ["| rows | ranks | contiguous | head-tail | by the mask |", "|---" * 5 + "|"]
    for name, (lengths, rule) in MEASURED.items():
        for ranks in (2, 4, 8):
            cells = [f"{value:.2f}" for value in measured(lengths, rule, ranks)]
            lines.append("| " + " | ".join([name, str(ranks), *cells]) + " |")
    return "\n".join(lines)


def test_the_table_in_the_docs():
    """FNMODELS_UPDATE_DOCS=1 writes the table."""
    begin, end = "<!-- balance: written by tests/fnmodels/inputs/test_load_balance.py -->\n", "\n<!-- end -->"
    before, rest = DOCS.read_text().split(begin)
    _, after = rest.split(end, 1)
    wanted = before + begin + table() + end + after
    if os.environ.get("FNMODELS_UPDATE_DOCS"):
        DOCS.write_text(wanted)
    assert DOCS.read_text() == wanted


@pytest.mark.parametrize("name", MEASURED)
def test_the_order_made_from_the_mask_is_the_most_even(name):
    """Within 4% with blocks of 128, the best possible with equal shards of a window."""
    lengths, rule = MEASURED[name]
    for ranks in (2, 4, 8):
        contiguous, head_tail, by_mask = measured(lengths, rule, ranks)
        assert by_mask <= 1.04 and by_mask <= contiguous and by_mask <= head_tail + 0.02

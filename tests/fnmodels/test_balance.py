"""Orders for context parallelism: permutations, their inverses, and how even they are."""

import pytest

import fnmodels
from fnmodels.balance import balance, balanced_order, head_tail_order, imbalance, inverse_order, visible_keys

RANKS, LENGTH = 4, 256


def packed(lengths: list[int], rule: fnmodels.Rule) -> fnmodels.Mask:
    segments = fnmodels.segments_from_lengths([lengths], LENGTH)
    return fnmodels.build_mask(rule, fnmodels.positions_from_segments(segments), segments)


MASKS = {
    "causal": packed([LENGTH], fnmodels.Causal()),
    "packed": packed([100, 30, 3, 60, 1, 40], fnmodels.Causal()),
    "sliding": packed([LENGTH], fnmodels.Causal() & fnmodels.Window(16)),
}


def test_head_tail_splits_one_triangle_evenly():
    order = head_tail_order(8, 2)
    assert order.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert imbalance(MASKS["causal"], RANKS, head_tail_order(LENGTH, RANKS)) == 1.0
    # contiguous shares: rank 3 of 4 holds (256^2 - 192^2) of 256^2 pairs, four times its fair quarter of 1
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


def test_visible_keys_counts_the_dense_mask():
    mask = MASKS["packed"]
    assert visible_keys(mask, chunk=7).equal(mask.dense()[:, 0].sum(-1))


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
    mask = fnmodels.build_mask(fnmodels.Causal(), fnmodels.positions_from_segments(segments), segments)
    order = balanced_order(mask, RANKS, block=8)
    assert order.shape == (2, LENGTH) and not order[0].equal(order[1])


def test_lengths_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="divisible by 6, not 8"):
        head_tail_order(8, 3)
    with pytest.raises(ValueError, match="divisible by 384, not 256"):
        balanced_order(MASKS["causal"], 3)

"""Tests of data order: table-free permutations, exact proportions of sources, and slices of a batch by rank."""

from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.data.sampling import draw_source, permute, rank_slice, sample_rows


@given(st.integers(1, 300), st.integers(-(2**70), 2**70), st.integers(0, 9))
def test_every_place_goes_to_one_place(count: int, seed: int, epoch: int) -> None:
    whole = permute(np.arange(count), count, seed, epoch)
    assert sorted(whole.tolist()) == list(range(count))
    some = np.arange(count)[:: max(1, count // 7)]
    assert permute(some, count, seed, epoch).tolist() == whole[some].tolist()


def test_keys_give_permutations_as_if_by_chance() -> None:
    """All 24 permutations of four are equally likely, as is every position for each of 50 (chi-square)."""
    orders = Counter(tuple(permute(np.arange(4), 4, seed, 0).tolist()) for seed in range(2400))
    assert set(orders) == set(permutations(range(4)))
    assert sum((found - 100) ** 2 / 100 for found in orders.values()) < 23 + 3 * (2 * 23) ** 0.5
    met = np.zeros((50, 50))
    for seed in range(500):
        met[np.arange(50), permute(np.arange(50), 50, seed, 1)] += 1
    assert abs(((met - 10) ** 2 / 10).sum() / 49**2 - 1) < 0.1


def test_the_order_is_the_same_for_ever() -> None:
    """Recorded from the first version: a run may be resumed years later, on another machine."""
    assert permute(np.arange(8), 8, 0, 0).tolist() == RECORDED
    assert permute(np.arange(3), 2**40, 1, 2, 3).tolist() == RECORDED_LARGE
    assert sample_rows((5, 3), (2, 1), 7, 2, 6) == RECORDED_BATCH


RECORDED = [2, 7, 6, 3, 0, 5, 4, 1]
RECORDED_LARGE = [672446594347, 460998718861, 530866682899]
RECORDED_BATCH = [(0, 2, 2), (0, 3, 1), (1, 2, 1), (0, 2, 1), (1, 1, 1), (0, 0, 2)]


@pytest.mark.parametrize("weights", [(1,), (3, 1), (5, 3, 1, 1), (1, 1, 1, 1, 1, 1, 1), (1000, 1), (1, 1000), (0, 2)])
def test_proportions_hold_after_every_sample(weights: tuple[int, ...]) -> None:
    counts = [0] * len(weights)
    for sample in range(3000):
        source, before = draw_source(sample, weights)
        assert before == counts[source]
        counts[source] += 1
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - (sample + 1) * weight / sum(weights)) <= len(weights) / 2


def test_an_exhausted_source_begins_again_in_a_new_order() -> None:
    """7 and 100 rows in the proportion 2 : 1, whatever the size of the batch."""
    drawn = [row for step in range(20) for row in sample_rows((7, 100), (2, 1), 3, step, 6)]
    assert Counter(source for source, _, _ in drawn) == {0: 80, 1: 40}
    epochs: dict[int, list[int]] = {}
    for source, row, epoch in drawn:
        if source == 0:
            epochs.setdefault(epoch, []).append(row)
    assert sorted(epochs) == list(range(80 // 7 + 1))
    for epoch in range(80 // 7):
        assert sorted(epochs[epoch]) == list(range(7))
    assert epochs[0] != epochs[1] != epochs[2]
    assert {epoch for source, _, epoch in drawn if source == 1} == {0}


def test_no_place_in_the_batch_belongs_to_a_source() -> None:
    found = [sample_rows((50, 50), (1, 1), 0, step, 2)[0][0] for step in range(40)]
    assert 10 < sum(found) < 30


def test_seeds_and_sources_have_orders_of_their_own() -> None:
    both = sample_rows((1000, 1000), (1, 1), 0, 0, 40)
    one, other = ([row for source, row, _ in both if source == n] for n in (0, 1))
    assert one != other
    assert sample_rows((1000, 1000), (1, 1), 1, 0, 40) != both


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_ranks_parts_are_the_batch(ranks: int) -> None:
    chosen = sample_rows((9,), (1,), 0, 3, 8)
    assert [row for rank in range(ranks) for row in rank_slice(chosen, rank, ranks)] == chosen


def test_what_does_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of 6 rows does not divide over 4 ranks"):
        rank_slice(range(6), 0, 4)
    with pytest.raises(ValueError, match="rank is 4: with 4 ranks"):
        rank_slice(range(8), 4, 4)
    with pytest.raises(ValueError, match=r"the weights are \[0, 0\]"):
        draw_source(0, [0, 0])

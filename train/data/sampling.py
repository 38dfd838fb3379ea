"""Stateless shuffling and source sampling: the rows of a step's batch as a function of (seed, step).

There is no data loader state to save. Integer arithmetic and hashes replace a library's random number generator, so
that the order is the same on every machine and in every version.
"""

import hashlib
from collections.abc import Sequence

import numpy as np


def draw_source(sample: int, weights: Sequence[int]) -> tuple[int, int]:
    """(source of sample number `sample` of the run, number of earlier samples from that source).

    Deterministic: after any number of samples, each source's count is within half a sample per source of its
    proportion. The samples not taken by one source are divided among the sources after it. ValueError where no weight
    is positive.
    """
    remaining = sum(weights)
    for source, weight in enumerate(weights):
        before, after = (_round(count * weight, remaining) for count in (sample, sample + 1))
        if after > before:
            return source, before
        sample, remaining = sample - before, remaining - weight
    raise ValueError(f"the weights are {list(weights)}: at least one must be positive, and none negative")


def drawn_samples(samples: int, weights: Sequence[int]) -> list[int]:
    """The number of the run's first `samples` samples that come from each source, by `draw_source`."""
    remaining, counts = sum(weights), []
    for weight in weights:
        counts.append(_round(samples * weight, remaining))
        samples, remaining = samples - counts[-1], remaining - weight
    return counts


def place_samples(weights: Sequence[int], seed: int, step: int, batch_rows: int) -> list[tuple[int, int]]:
    """(source, number of the sample among that source's) of each row of the batch of `step`, in the batch's order."""
    shuffled = permute(np.arange(batch_rows), batch_rows, seed, -1, step)
    return [draw_source(step * batch_rows + number, weights) for number in shuffled.tolist()]


def _round(numerator: int, denominator: int) -> int:
    """The nearest integer to the fraction, half rounded up; 0 where the denominator is 0."""
    return (2 * numerator + denominator) // (2 * denominator) if denominator else 0


def permute(indices: np.ndarray, count: int, *key: int) -> np.ndarray:
    """Maps `indices`, int64 [M], through a pseudorandom permutation of range(count) that depends on `key`.

    Swap-or-not shuffle (Hoang, Morris and Rogaway 2012): each round swaps x and (pivot - x) mod count, or does not, by
    a bit hashed from the larger of the two. Memory does not grow with `count`.
    """
    rounds = 6 * count.bit_length() + 20
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    noise = _splitmix64(np.arange(2 * rounds, dtype=np.uint64) + np.uint64(seed))
    pivots = (noise[:rounds] % np.uint64(count)).astype(np.int64)
    for pivot, salt in zip(pivots, noise[rounds:], strict=True):
        partner = (pivot - indices) % count
        bits = _splitmix64(np.maximum(indices, partner).astype(np.uint64) ^ salt)
        indices = np.where(bits >> np.uint64(63), partner, indices)
    return indices


def _splitmix64(values: np.ndarray) -> np.ndarray:
    """The mixing function of splitmix64 (Steele, Lea and Flood 2014): a bijection of uint64."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sample_rows(
    counts: Sequence[int], weights: Sequence[int], seed: int, step: int, batch_rows: int
) -> list[tuple[int, int, int]]:
    """(source, row, epoch) of each row of the batch of `step` (from 0). counts: the number of rows of each source.

    Each source is reshuffled when it is exhausted, independently of the others: a batch may span epochs. The rows of a
    batch are shuffled too, so that no rank always gets the rows of the same source.
    """
    drawn = place_samples(weights, seed, step, batch_rows)
    places = [(source, *divmod(nth, counts[source])) for source, nth in drawn]
    rows = np.zeros(batch_rows, np.int64)
    for source, epoch in {place[:2] for place in places}:
        slots = [slot for slot, place in enumerate(places) if place[:2] == (source, epoch)]
        rows[slots] = permute(np.array([places[slot][2] for slot in slots]), counts[source], seed, source, epoch)
    return [(source, row, epoch) for (source, epoch, _), row in zip(places, rows.tolist(), strict=True)]


def rank_slice(chosen: Sequence, rank: int, ranks: int) -> Sequence:
    """The contiguous slice of a batch that data-parallel rank `rank` gets. ValueError where it is not divisible."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank}: with {ranks} ranks it must be from 0 to {ranks - 1}")
    if len(chosen) % ranks:
        raise ValueError(f"a batch of {len(chosen)} rows does not divide over {ranks} ranks")
    size = len(chosen) // ranks
    return chosen[rank * size : (rank + 1) * size]

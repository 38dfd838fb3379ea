"""Which rows a step learns from, as functions of (seed, step) with random access: no loader has a state to save.

B rows of a batch over all ranks, R rows of a source. Exact integers, and hashes instead of a library's random numbers:
the order is the same on every machine and in every version.
"""

import hashlib
from collections.abc import Sequence

import numpy as np


def draw(sample: int, weights: Sequence[int]) -> tuple[int, int]:
    """(the source that sample number `sample` of the run is drawn from, how many samples before it were drawn from it).

    Not by chance: after any number of samples, each source has its share of them to within half a sample for each
    of the sources. What one source leaves over is shared out among those after it.
    """
    left = sum(weights)
    for source, weight in enumerate(weights):
        before, after = (_nearest(count * weight, left) for count in (sample, sample + 1))
        if after > before:
            return source, before
        sample, left = sample - before, left - weight
    raise ValueError(f"the weights are {list(weights)}: one of them is positive, and none negative")


def _nearest(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator) if denominator else 0


def permuted(places: np.ndarray, count: int, *key: int) -> np.ndarray:
    """Where a random permutation of range(count), another for every key, sends `places`, int64 [M].

    Swap-or-not (Hoang, Morris and Rogaway 2012): each round swaps x and (pivot - x) mod count, or does not, by a bit
    hashed from the larger of the two. No table of `count` entries is made, whatever the size of the data.
    """
    rounds = 6 * count.bit_length() + 20
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    noise = _hashed(np.arange(2 * rounds, dtype=np.uint64) + np.uint64(seed))
    pivots = (noise[:rounds] % np.uint64(count)).astype(np.int64)
    for pivot, salt in zip(pivots, noise[rounds:], strict=True):
        partner = (pivot - places) % count
        bits = _hashed(np.maximum(places, partner).astype(np.uint64) ^ salt)
        places = np.where(bits >> np.uint64(63), partner, places)
    return places


def _hashed(values: np.ndarray) -> np.ndarray:
    """The step of splitmix64 (Steele, Lea and Flood 2014): uint64 to uint64, one to one."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def choose(
    counts: Sequence[int], weights: Sequence[int], seed: int, step: int, batch_rows: int
) -> list[tuple[int, int, int]]:
    """(source, row, epoch) of each row of the batch of a step (steps from 0). `counts` are the rows of the sources.

    A source that is exhausted begins again in a new order, each at its own time: a batch may span epochs. Inside the
    batch the rows are shuffled, so that no rank gets the rows of one source for ever.
    """
    shuffled = permuted(np.arange(batch_rows), batch_rows, seed, -1, step)
    drawn = [draw(step * batch_rows + number, weights) for number in shuffled.tolist()]
    places = [(source, *divmod(nth, counts[source])) for source, nth in drawn]
    rows = np.zeros(batch_rows, np.int64)
    for source, epoch in {place[:2] for place in places}:
        slots = [slot for slot, place in enumerate(places) if place[:2] == (source, epoch)]
        rows[slots] = permuted(np.array([places[slot][2] for slot in slots]), counts[source], seed, source, epoch)
    return [(source, row, epoch) for (source, epoch, _), row in zip(places, rows.tolist(), strict=True)]


def share(chosen: Sequence, rank: int, ranks: int) -> Sequence:
    """The part of a batch that one of `ranks` data-parallel ranks has: those of all ranks in order are the batch."""
    if not 0 <= rank < ranks:
        raise ValueError(f"rank is {rank}: of {ranks} ranks it is one from 0 to {ranks - 1}")
    if len(chosen) % ranks:
        raise ValueError(f"a batch of {len(chosen)} rows does not divide over {ranks} ranks")
    size = len(chosen) // ranks
    return chosen[rank * size : (rank + 1) * size]

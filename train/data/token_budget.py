"""Packed rows of at most N tokens from sequences of any lengths, equally many for every data-parallel rank.

rows = token_budget({"tokens": rollouts, "advantages": gains}, 4096, ranks=8)     # [rank][microbatch]
mine = rows[rank]
found = engine.infer([row.batch for row in mine], logprobs)
logps = unpacked(mine, [logp for logp, _, _ in found])                            # {number of the sequence: [T]}
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from fnmodels.inputs.packing import IGNORE


@dataclass(frozen=True)
class PackedRow:
    """batch: a microbatch of one row [1, T]: tokens, positions, segment_ids, labels and the entries given.

    sequences: the number of each sequence in it, in order; lengths: theirs in tokens. Both are empty for a row of one
    padding token, which adds nothing.
    """

    batch: dict[str, Tensor]
    sequences: tuple[int, ...]
    lengths: tuple[int, ...]


def token_budget(
    entries: Mapping[str, Sequence[Tensor] | Tensor],
    budget: int,
    *,
    ranks: int = 1,
    cost: Callable[[int], float] = float,
) -> list[list[PackedRow]]:
    """Places sequences in packed rows of at most `budget` tokens, as many rows on each rank.

    Rows with one index have similar cost on all ranks, which wait for each other there. The number of rows is the
    smallest that the longest-first placement finds. A model whose rotary tables depend on the length (dynamic,
    longrope) has one table for a batch, that of its longest sequence: take those above its original length apart from
    the others.

    Args:
        entries: Per-token tensors, each a list of [T, ...] or a jagged nested tensor [N, T*, ...]; "tokens" is needed.
            labels default to the next token of the sequence, -100 at its end.
        budget: Tokens in a row at most.
        ranks: The number of ranks.
        cost: The cost of a sequence of a length, which is balanced over rows: float balances tokens, `lambda n: n * n`
            attention.

    Returns:
        [rank][microbatch]: the rows.

    Raises:
        ValueError: A sequence is longer than the budget, entries have different lengths, or tokens are missing.
    """
    if "tokens" not in entries:
        raise ValueError(f"The entries have no tokens; their names are {sorted(entries)}.")
    given = {name: _sequences(name, values) for name, values in entries.items()}
    lengths = [len(tokens) for tokens in given["tokens"]]
    for name, values in given.items():
        if [len(value) for value in values] != lengths:
            raise ValueError(f"{name!r} must have as many sequences as tokens, and each as many entries as its tokens.")
    bins = rows_within(lengths, budget, multiple=ranks, cost=cost)
    rows: list[list[PackedRow]] = [[] for _ in range(ranks)]
    for start in range(0, len(bins), ranks):
        turn = bins[start : start + ranks]
        turn = turn if start // ranks % 2 == 0 else turn[::-1]  # so that no rank has the dearest row every time
        for of_rank, numbers in zip(rows, turn, strict=True):
            of_rank.append(_row(given, numbers))
    return rows


def rows_within(
    lengths: Sequence[int],
    budget: int,
    *,
    multiple: int = 1,
    least: int = 0,
    cost: Callable[[int], float] = float,
) -> list[list[int]]:
    """The numbers of the sequences in each row of at most `budget` tokens, the row of the highest cost first.

    There are a multiple of `multiple` rows, and at least `least`; none is empty where sequences are as many as rows.
    cost: of a sequence of a length, which is balanced over rows. ValueError for a sequence longer than the budget.
    """
    if not all(isinstance(number, Integral) and number >= 1 for number in (budget, multiple)):
        raise ValueError(f"The budget is {budget!r} and ranks are {multiple!r}; both must be whole numbers from 1.")
    for number, length in enumerate(lengths):
        if not 1 <= length <= budget:
            raise ValueError(f"Sequence {number} has {length} tokens; a row takes 1 to {budget} (the budget).")
    costs = [cost(length) for length in lengths]
    order = sorted(range(len(lengths)), key=lambda number: (-costs[number], -lengths[number]))
    count = multiple * max(1, -(-sum(lengths) // (budget * multiple)), -(-least // multiple))
    while (found := _placed(order, lengths, costs, budget, count)) is None:
        count += multiple
    return sorted(map(sorted, found), key=lambda one: -sum(costs[number] for number in one))


def unpacked(rows: Sequence[PackedRow], values: Sequence[Tensor]) -> dict[int, Tensor]:
    """Sorts values per token back to the sequences that `token_budget` placed.

    Args:
        rows: The rows of one rank.
        values: [1, T, ...] of each row, such as log-probabilities.

    Returns:
        {number of the sequence: [T, ...]}, in the order of the numbers.
    """
    found: dict[int, Tensor] = {}
    for row, value in zip(rows, values, strict=True):
        if row.sequences:
            found |= dict(zip(row.sequences, value[0].split(row.lengths), strict=True))
    return dict(sorted(found.items()))


def _sequences(name: str, values: Sequence[Tensor] | Tensor) -> list[Tensor]:
    listed = values.unbind() if isinstance(values, Tensor) and values.ndim else values
    if not isinstance(listed, Sequence) or not all(isinstance(one, Tensor) and one.ndim for one in listed):
        raise ValueError(f"{name!r} must be a list of tensors [T, ...] or a jagged tensor of them; it is {values!r}.")
    return list(listed)


def _placed(
    order: Sequence[int], lengths: Sequence[int], costs: Sequence[float], budget: int, count: int
) -> list[list[int]] | None:
    """Each sequence into the cheapest row that has room; None where one finds no room."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, at, 0) for at in range(count)]  # (cost, row, tokens), the cheapest first
    full: list[
        tuple[int, float, int]
    ] = []  # (tokens, cost, row) without room for the last sequence, the emptiest first
    for number in order:
        room = budget - lengths[number]
        while full and full[0][0] <= room:
            used, cost, at = heapq.heappop(full)
            heapq.heappush(heap, (cost, at, used))
        while heap and heap[0][2] > room:
            cost, at, used = heapq.heappop(heap)
            heapq.heappush(full, (used, cost, at))
        if not heap:
            return None
        cost, at, used = heap[0]
        heapq.heapreplace(heap, (cost + costs[number], at, used + lengths[number]))
        bins[at].append(number)
    return bins


def _row(given: Mapping[str, list[Tensor]], numbers: Sequence[int]) -> PackedRow:
    tokens = [given["tokens"][number] for number in numbers]
    device = given["tokens"][0].device if given["tokens"] else None
    lengths = tuple(len(one) for one in tokens)
    if not numbers:
        batch = {name: values[0][:1].new_zeros(1, 1, *values[0].shape[1:]) for name, values in given.items() if values}
        none = torch.zeros(1, 1, dtype=torch.long, device=device)
        return PackedRow(
            {"tokens": none} | batch | dict(positions=none, segment_ids=none, labels=none + IGNORE), (), ()
        )
    batch = {name: torch.cat([values[number] for number in numbers])[None] for name, values in given.items()}
    batch["positions"] = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    batch["segment_ids"] = torch.repeat_interleave(torch.tensor(lengths, device=device))[None] + 1
    if "labels" not in batch:
        batch["labels"] = torch.cat([torch.cat((one[1:], one.new_full((1,), IGNORE))) for one in tokens])[None]
    return PackedRow(batch, tuple(numbers), lengths)

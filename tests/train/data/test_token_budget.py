"""Sequences in packed rows under a token budget: nothing is lost, rows fit, ranks have equally many, balanced."""

import functools
import random
import time
from collections.abc import Callable

import pytest
import torch

from tests.support.cases import cases, generic_params
from tests.support.garbage import no_collection
from train import token_budget, token_logprobs, unpacked
from train.data.token_budget import _placed, rows_within
from train.engine import Engine

CONFIG = next(case.config for case in cases() if case.name == "llama")


def _sequences(lengths: list[int]) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(1, CONFIG.vocab_size, (length,), generator=draw) for length in lengths]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("cost", [float, lambda n: n * n])
def test_all_sequences_come_back_from_balanced_rows(ranks: int, cost: object) -> None:
    draw = random.Random(0)
    lengths = [draw.randint(1, 60) for _ in range(97)]
    tokens = _sequences(lengths)
    rows = token_budget({"tokens": tokens}, 128, ranks=ranks, cost=cost)  # type: ignore[arg-type]
    assert len({len(of_rank) for of_rank in rows}) == 1
    assert all(row.batch["tokens"].shape[1] <= 128 for of_rank in rows for row in of_rank)
    assert sum(len(of_rank) for of_rank in rows) <= -(-sum(lengths) // 128) + 2 * ranks
    flat = [row for of_rank in rows for row in of_rank]
    found = unpacked(flat, [row.batch["tokens"] for row in flat])
    assert list(found) == list(range(97)) and all(map(torch.equal, found.values(), tokens))
    for turn in zip(*rows, strict=True):  # rows that run at the same time
        spent = [sum(map(cost, row.lengths)) for row in turn]  # type: ignore[call-overload]
        assert max(spent) <= 1.1 * min(spent)


def test_the_log_probabilities_are_those_of_each_sequence_alone() -> None:
    tokens = _sequences([5, 9, 2, 7])
    jagged = torch.nested.as_nested_tensor(tokens, layout=torch.jagged)
    fn = functools.partial(token_logprobs, config=CONFIG)
    engine = Engine(CONFIG, generic_params(CONFIG), None)
    found = []
    for given, budget in ((jagged, 13), (tokens, 9)):
        (rows,) = token_budget({"tokens": given, "gain": [t.float() for t in tokens]}, budget)
        logps = [logp for logp, _, _ in engine.infer([row.batch for row in rows], fn)]
        found.append(unpacked(rows, logps))
        assert all(torch.equal(row.batch["gain"], row.batch["tokens"].float()) for row in rows)
    for number, logp in found[0].items():
        torch.testing.assert_close(logp, found[1][number])
        assert logp.shape == tokens[number].shape and logp[-1] == 0 and (logp[:-1] < 0).all()


def test_ranks_without_a_sequence_get_a_row_that_counts_nothing() -> None:
    rows = token_budget({"tokens": _sequences([4, 3]), "gain": [torch.ones(4), torch.ones(3)]}, 8, ranks=3)
    assert [len(of_rank) for of_rank in rows] == [1, 1, 1]
    empty = rows[2][0]
    assert empty.sequences == () and empty.batch["labels"].tolist() == [[-100]]
    assert {name: x.dtype for name, x in empty.batch.items()} == {n: x.dtype for n, x in rows[0][0].batch.items()}


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"tokens": [torch.ones(9)]}, "Sequence 0 has 9 tokens; a row takes 1 to 8"),
        ({"tokens": [torch.ones(0)]}, "Sequence 0 has 0 tokens"),
        ({"gain": [torch.ones(3)]}, "no tokens; their names are .'gain'"),
        ({"tokens": [torch.ones(3)], "gain": [torch.ones(2)]}, "'gain' must have as many"),
        ({"tokens": [[1, 2, 3]]}, "'tokens' must be a list of tensors .* it is .*1, 2, 3"),
        ({"tokens": [torch.ones(3)], "gain": [torch.tensor(1.0)]}, "'gain' must be a list of tensors"),
        ({"tokens": [torch.ones(3)], "gain": torch.tensor(1.0)}, "'gain' must be a list of tensors"),
        ({"tokens": [torch.ones(3)], "gain": 1.0}, "'gain' must be a list of tensors"),
    ],
)
def test_what_cannot_be_packed_is_named(entries: dict[str, list[torch.Tensor]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        token_budget(entries, 8)


@pytest.mark.parametrize("numbers", [{"budget": 8.5}, {"budget": 8, "ranks": 1.0}, {"budget": 0}])
def test_a_budget_is_a_whole_number(numbers: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="both must be whole numbers from 1"):
        token_budget({"tokens": [torch.ones(3)]}, **numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize("cost", [float, lambda n: n * n, lambda n: 60.0 - n])
def test_a_sequence_goes_to_the_cheapest_row_with_room(cost: Callable[[int], float]) -> None:
    draw = random.Random(0)
    for count in range(20, 40):
        lengths = [draw.randint(1, 60) for _ in range(100)]
        costs = [cost(length) for length in lengths]
        order = sorted(range(100), key=lambda number, costs=costs: -costs[number])
        found = _placed(order, lengths, costs, 100, count)
        bins: list[list[int]] = [[] for _ in range(count)]
        for number in order:
            room = [one for one in bins if sum(lengths[n] for n in one) + lengths[number] <= 100]
            if not room:
                assert found is None
                break
            min(room, key=lambda one, costs=costs: sum(costs[n] for n in one)).append(number)
        else:
            assert found == bins


def test_many_sequences_are_placed_in_linear_time() -> None:
    draw = random.Random(0)
    lengths = [draw.randint(1, 2000) for _ in range(10_000)]
    with no_collection():
        start = time.process_time()
        rows = rows_within(lengths, 4096, multiple=8, cost=lambda n: n * n)
        taken = time.process_time() - start
    assert taken < 1.5  # 0.1; 4 where each sequence looks at all rows
    assert sorted(number for row in rows for number in row) == list(range(10_000))
    assert all(sum(lengths[number] for number in row) <= 4096 for row in rows)

"""Tests of scoring: batched scores of continuations equal those of each pair alone, from all its logits."""

import pytest
import torch

import fnmodels
from tests.support.cases import cases, generic_params
from train.eval import scoring
from train.eval.scoring import score_continuations

CASES = {name: next(case for case in cases() if case.family == name) for name in ("llama", "qwen_moe", "phi3")}
CASES["longrope"] = next(case for case in cases() if case.name == "llama_longrope_long")
LONGEST = {"longrope": 60}  # its tables are others from 33 tokens on


def _pairs(config, longest: int = 12) -> list[tuple[list[int], list[int]]]:
    draws = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(config.vocab_size, (count,), generator=draws).tolist()

    sizes = [(1, 1), (5, 3), (3, 0), (2, longest - 3), (7, 2), (1, 4), (4, 1)]
    return [(ids(before), ids(after)) for before, after in sizes]


def direct(params, config, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The score of one pair alone, from all logits of one row without padding."""
    ids = torch.tensor([[*context, *continuation]])
    logits = fnmodels.forward(params, *fnmodels.prepare(config, ids[:, :-1]), config=config, kernel="math")[0]
    new = len(continuation)
    target, logp = ids[0, len(ids[0]) - new :], torch.log_softmax(logits.double(), -1)[logits.shape[0] - new :]
    total = logp.gather(-1, target[:, None]).sum()
    return float(total), bool((logp.argmax(-1) == target).all())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch_tokens", [1, 20, 4096])
def test_each_pair_as_if_alone(name: str, batch_tokens: int) -> None:
    config = CASES[name].config
    params, pairs = generic_params(config), _pairs(config, LONGEST.get(name, 12))
    greedy = list(pairs[0][0])
    for _ in range(3):  # a continuation that is the likeliest
        row = fnmodels.prepare(config, torch.tensor([greedy]))
        greedy.append(int(fnmodels.forward(params, *row, config=config, kernel="math")[0, -1].argmax()))
    pairs.append((greedy[:1], greedy[1:]))
    found = score_continuations(params, config, pairs, batch_tokens=batch_tokens)
    expected = [(0.0, True) if not pair[1] else direct(params, config, *pair) for pair in pairs]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert found[-1][1] and not found[1][1]
    assert [logp for logp, _ in found] == pytest.approx([logp for logp, _ in expected], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch_tokens", [1, 60, 4096])
def test_pairs_that_share_a_context_compute_it_once(name: str, batch_tokens: int, monkeypatch) -> None:
    """As the choices of a question; beside pairs whose continuation is empty or long, or whose context is one token."""
    config = CASES[name].config
    params, (first, second, third, *_) = generic_params(config), _pairs(config)
    contexts = [[*second[0], 1, 2, 3], second[0], first[0]]
    answers = [[5], [6, 7, 8], [], third[0], [5, 9], list(range(6))]
    pairs = [(context, answer) for answer in answers for context in contexts]
    computed = []
    decode_ = fnmodels.decode_
    monkeypatch.setattr(
        fnmodels, "decode_", lambda p, i, *a, **k: computed.append(i["valid"].sum()) or decode_(p, i, *a, **k)
    )
    found = score_continuations(params, config, pairs, batch_tokens=batch_tokens)
    expected = [(0.0, True) if not pair[1] else direct(params, config, *pair) for pair in pairs]
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [logp for logp, _ in found] == pytest.approx([logp for logp, _ in expected], rel=1e-5, abs=1e-5)
    if batch_tokens == 4096:
        news = sum(map(len, answers))
        assert sum(computed) == (len(contexts[0]) - 1) + (len(contexts[1]) - 1) + 2 * news


def test_a_context_that_is_too_long_loses_its_beginning() -> None:
    config = fnmodels.models.decoder.llama.Config(31, 16, 24, 2, 2, 1, max_position_embeddings=8)
    params = generic_params(config)
    context, continuation = list(range(12)), [3, 4, 5]
    (found,) = score_continuations(params, config, [(context, continuation)])
    assert found[0] == pytest.approx(direct(params, config, context[-6:], continuation)[0], rel=1e-5)
    assert found[0] != pytest.approx(direct(params, config, context[-5:], continuation)[0], rel=1e-5)
    with pytest.raises(ValueError, match="has 9 tokens; the model takes 8 at most"):
        score_continuations(params, config, [([1], list(range(9)))])
    with pytest.raises(ValueError, match="A context is empty"):
        score_continuations(params, config, [([], [1])])


@pytest.mark.parametrize(("name", "rows"), [("llama", 1), ("longrope", 6)])
def test_sequences_are_packed_unless_a_table_is_one_per_row(name: str, rows: int, monkeypatch) -> None:
    config, shapes = CASES[name].config, []
    states = scoring.model_states
    monkeypatch.setattr(
        scoring, "model_states", lambda p, batch, **k: shapes.append(batch["tokens"].shape) or states(p, batch, **k)
    )
    pairs = _pairs(config, LONGEST.get(name, 12))
    score_continuations(generic_params(config), config, pairs)
    ((count, width),) = shapes
    assert count == rows
    if rows == 1:  # without padding
        assert width == sum(len(context) + len(new) - 1 for context, new in pairs if new)


def test_nothing_to_score() -> None:
    config = CASES["llama"].config
    assert score_continuations(generic_params(config), config, []) == []


def test_with_invariant_products_batches_change_no_bit() -> None:
    params, config = generic_params(CASES["llama"].config), CASES["llama"].config
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, config.vocab_size, (60,), generator=draw).tolist()
    pairs = [(ids[:20], ids[20:23]), (ids[:20], ids[40:45]), (ids[5:9], ids[30:45]), (ids[:1], ids[50:52])]
    found = [score_continuations(params, config, pairs, batch_tokens=n, kernel="invariant") for n in (1, 30, 4096)]
    assert found[0] == found[1] == found[2]

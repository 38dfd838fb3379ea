"""Draws have the stated distribution, and a row's draws depend on nothing but its own logits, settings and counter."""

import dataclasses

import pytest
import torch
from torch import Tensor

from fnmodels import tree
from train.generation import sampling as sampling_module
from train.generation.noise import exponential, random_bits
from train.generation.sampling import Sampling, check_sampling, sample_state, sample_step, stack_samplings, truncated
from train.losses.logprobs import logprobs

DRAWS, VOCAB = 100_000, 24
LOGITS = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 1.5


def _state(sampling: Sampling, batch: int, seed: int = 0, **more):
    return sample_state(sampling, torch.full((batch,), seed), torch.arange(batch), **more)


def _reference(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [V] in fp64, one truncation after the other, by plain loops."""
    p = (logits.double() / sampling.temperature).softmax(0)
    order = p.argsort(descending=True).tolist()
    kept = order[: sampling.top_k or len(order)]
    total, sum_, nucleus = sum(float(p[i]) for i in kept), 0.0, []
    for i in kept:
        if sum_ < sampling.top_p * total:
            nucleus.append(i)
        sum_ += float(p[i])
    nucleus = [i for i in nucleus if p[i] >= sampling.min_p * p[order[0]]]
    out = torch.zeros_like(p)
    out[nucleus] = p[nucleus]
    return out / out.sum()


def _p_value(counts: Tensor, p: Tensor) -> float:
    """That of Pearson's test; -1 where something of probability 0 was drawn."""
    if bool((counts[p == 0] > 0).any()):
        return -1.0
    expected = (p * counts.sum())[p > 0]
    statistic = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2)) if len(expected) > 1 else 1.0


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=1.7),
    Sampling(top_k=5),
    Sampling(top_k=1),
    Sampling(top_p=0.7),
    Sampling(top_p=1e-6),
    Sampling(min_p=0.2),
    Sampling(temperature=1.3, top_k=12, top_p=0.8, min_p=0.1),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_draws_have_the_distribution_of_the_setting(sampling: Sampling) -> None:
    tokens, logp, logp_kept, after = sample_step(LOGITS.expand(DRAWS, -1), _state(sampling, DRAWS))
    p = _reference(LOGITS, sampling)
    assert _p_value(torch.bincount(tokens, minlength=VOCAB), p) > 1e-3
    torch.testing.assert_close(logp_kept, p[tokens].log().float(), rtol=1e-5, atol=1e-5)
    wanted, _ = logprobs(LOGITS.expand(DRAWS, -1), tokens, temperature=sampling.temperature)
    assert torch.equal(logp, wanted)  # the trainer's, to the bit
    assert bool((after.steps == 1).all())


@pytest.mark.parametrize("over", ["seeds", "rows", "steps"])
def test_each_counter_gives_independent_draws(over: str) -> None:
    """Over seeds, rows or steps alone, and pairs of neighbouring counts are independent."""
    zeros, count = torch.zeros(DRAWS, dtype=torch.int64), torch.arange(DRAWS)
    counters = {"seeds": zeros + 3, "rows": zeros, "steps": zeros} | {over: count}
    state = sample_state(Sampling(), counters["seeds"], counters["rows"], steps=counters["steps"])
    logits = torch.tensor([0.0, 0.5, -0.5]).expand(DRAWS, -1)
    tokens = sample_step(logits, state)[0]
    p = logits[0].double().softmax(0)
    assert _p_value(torch.bincount(tokens, minlength=3), p) > 1e-3
    pairs = torch.bincount(tokens[:-1:2] * 3 + tokens[1::2], minlength=9)
    assert _p_value(pairs, (p[:, None] * p).flatten()) > 1e-3


def test_noise_is_exponential_and_its_bits_are_even() -> None:
    count = torch.arange(1000)
    noise = exponential(count, count * 0, count * 0, 1000).double().flatten()
    assert bool((noise > 0).all()) and bool(noise.isfinite().all())
    edges = -torch.log1p(-torch.linspace(0, 1, 101, dtype=torch.float64)[1:-1])
    counts = torch.bincount(torch.bucketize(noise, edges), minlength=100)
    assert _p_value(counts, torch.full((100,), 0.01, dtype=torch.float64)) > 1e-3
    assert abs(float(noise.min()) * 1e6 - 1) < 10  # not rounded to a grid: the least of 1e6 is about 1e-6
    bits = random_bits(count, count * 0, count * 0, 1000)
    ones = torch.stack([((bits >> i) & 1).sum() / bits.numel() for i in range(64)])
    assert float((ones - 0.5).abs().max()) < 5 * 0.5 / 1000
    assert len(bits.unique()) == bits.numel()


MIXED = [
    Sampling(),
    Sampling(temperature=0),
    Sampling(temperature=0.5, top_k=3),
    Sampling(top_p=0.6, repetition=1.3),
    Sampling(min_p=0.3, presence=0.5, frequency=0.2),
]


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Neighbours' settings, seeds, logits and number change no bit of a row, over steps."""
    logits = torch.randn(4, 5, VOCAB, generator=torch.Generator().manual_seed(1))
    prompts = [[i, 2 * i, 7] for i in range(5)]
    seeds, rows = torch.tensor([5, 5, 6, 7, 8]), torch.tensor([0, 1, 0, 3, 0])
    state = sample_state(stack_samplings(MIXED), seeds, rows, prompts=prompts, vocab=VOCAB)
    together = []
    for step in logits:
        *found, state = sample_step(step, state)
        together.append(found)
    for row, sampling in enumerate(MIXED):
        alone = sample_state(
            sampling, seeds[row : row + 1], rows[row : row + 1], prompts=prompts[row : row + 1], vocab=VOCAB
        )
        for step, found in zip(logits, together, strict=True):
            *own, alone = sample_step(step[row : row + 1], alone)
            assert all(torch.equal(a[0], b[row]) for a, b in zip(own, found, strict=True)), sampling


def test_one_seed_for_all_rows_gives_each_its_own_noise() -> None:
    tokens = sample_step(LOGITS.expand(50, -1), _state(Sampling(temperature=3.0), 50))[0]
    assert len(tokens.unique()) > 5


def test_a_state_goes_on_where_it_was_and_idle_rows_wait() -> None:
    logits = torch.randn(6, 3, VOCAB, generator=torch.Generator().manual_seed(2))
    state = _state(Sampling(temperature=2.0, frequency=0.5), 3, prompts=[[1], [2], [3]], vocab=VOCAB)
    every = []
    for step in logits:
        token, _, _, state = sample_step(step, state)
        every.append(token)
    state = _state(state.sampling, 3, prompts=[[1], [2], [3]], vocab=VOCAB)
    idle = torch.tensor([True, False, True])
    for step, wanted in zip(logits[:3], every, strict=False):
        token, _, _, state = sample_step(step, state, active=idle)
        assert torch.equal(token[idle], wanted[idle])
    assert state.steps.tolist() == [3, 0, 3] and state.counts is not None and int(state.counts[1].sum()) == 0
    for step, wanted in zip(logits[3:], every[3:], strict=True):
        token, _, _, state = sample_step(step, state)
        assert torch.equal(token[idle], wanted[idle])


def test_the_likeliest_token_at_temperature_0_has_the_models_own_log_probability() -> None:
    tokens, logp, logp_kept, _ = sample_step(LOGITS[None].bfloat16(), _state(Sampling(temperature=0), 1))
    assert tokens.tolist() == [int(LOGITS.bfloat16().argmax())] and logp_kept.tolist() == [0.0]
    torch.testing.assert_close(logp, LOGITS.bfloat16().float().log_softmax(0)[tokens])


def test_penalties_are_those_of_their_formulas() -> None:
    logits = torch.tensor([[2.0, -1.0, 3.0, 0.5]])
    sampling = Sampling(temperature=0, repetition=2.0, presence=0.25, frequency=0.5)
    state = _state(sampling, 1, prompts=[[1]], vocab=4)
    chosen = []
    for _ in range(5):
        token, _, _, state = sample_step(logits, state)
        chosen.append(int(token))
    # by hand: 3 -> 1.5 - 0.75 = 0.75 ; 2 -> 1 - 0.75 = 0.25 ; 0.5 -> 0.25 - 0.75 ; then 2 once more: 1.5 - 1.25 = 0.25
    assert chosen == [2, 0, 2, 3, 0]
    greedy = sample_step(logits, _state(Sampling(temperature=0, repetition=4.0), 1, prompts=[[0, 2]], vocab=4))[0]
    assert int(greedy) == 2  # 3/4 is above 2/4 and 0.5, and -1 is not in the prompt
    with pytest.raises(ValueError, match="needs the prompts"):
        _state(sampling, 1)


def test_truncation_by_tensors_is_truncation_by_numbers() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    each = [Sampling(), Sampling(top_k=4), Sampling(top_p=0.5), Sampling(min_p=0.1), Sampling(top_k=9, top_p=0.6)]
    each.append(Sampling(top_k=60, top_p=1.0))
    together = truncated(logits, stack_samplings(each))
    for row, sampling in enumerate(each):
        assert torch.equal(truncated(logits[row : row + 1], sampling)[0], together[row])
    assert int(together[1].isfinite().sum()) == 4
    steep = torch.tensor([[0.0, -200.0, -300.0]])  # shares that vanish beside the first
    assert bool(truncated(steep, Sampling(top_p=torch.tensor([1.0]))).isfinite().all())
    tied = torch.tensor([[1.0, 2.0, 1.0, 0.0]])
    assert truncated(tied, Sampling(top_k=2))[0].isfinite().tolist() == [True, True, True, False]


def test_logits_fn_edits_what_is_drawn_and_leaves_logp() -> None:
    only = [3, 8]

    def allowed(logits: Tensor) -> Tensor:
        mask = torch.full_like(logits, -torch.inf)
        mask[:, only] = 0
        return logits + mask

    tokens, logp, logp_kept, _ = sample_step(LOGITS.expand(500, -1), _state(Sampling(), 500), logits_fn=allowed)
    assert set(tokens.tolist()) == set(only)
    assert torch.equal(logp, LOGITS.log_softmax(0)[tokens])
    inside = LOGITS[only].log_softmax(0)
    torch.testing.assert_close(logp_kept, inside[(tokens == 8).long()])
    with pytest.raises(ValueError, match="all tokens of row 0"):
        sample_step(LOGITS[None], _state(Sampling(), 1), logits_fn=lambda x: x * 0 - torch.inf)
    with pytest.raises(ValueError, match=r"returned \[1, 5\]"):
        sample_step(LOGITS[None], _state(Sampling(), 1), logits_fn=lambda x: x[:, :5])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"min_p": 1.5}, "from 0 to 1"),
        ({"repetition": 0.0}, "repetition is 0.0"),
        ({"top_p": torch.tensor([0.5, 2.0])}, "top_p is"),
        ({"top_p": torch.tensor([0.5])}, r"\[B\] = \[2\]"),
    ],
)
def test_settings_out_of_range_are_named(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_sampling(dataclasses.replace(Sampling(), **change), 2)


def test_a_state_is_a_tree() -> None:
    state = _state(stack_samplings(MIXED), 5, prompts=[[1]] * 5, vocab=VOCAB)
    again = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, state)
    a, b = (sample_step(LOGITS.expand(5, -1), s)[0] for s in (state, again))
    assert torch.equal(a, b)


@pytest.mark.parametrize("rows", [1, 5])
def test_noise_of_later_draws_that_is_computed_at_once_is_that_of_each_draw(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a counter was replaced, or written into, and for rows that rest in a step."""
    sizes: list[int] = []
    real = sampling_module.exponential
    monkeypatch.setattr(sampling_module, "exponential", lambda *a: sizes.append(len(a[0])) or real(*a))
    logits = torch.randn(100, rows, VOCAB, generator=torch.Generator().manual_seed(2))
    state = _state(Sampling(), rows)
    for number, step in enumerate(logits):
        if number == 40:
            state = dataclasses.replace(state, steps=state.steps + 7)
        if number == 50:
            state.seeds.add_(1)
        active = torch.arange(rows) != 1 if 60 <= number < 65 else None
        fresh = dataclasses.replace(state)  # which knows no noise
        *wanted, after = sample_step(step, fresh, active=torch.ones(rows, dtype=torch.bool))
        *found, state = sample_step(step, state, active=active)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        steps = after.steps if active is None else torch.where(active, after.steps, fresh.steps)
        assert torch.equal(state.steps, steps)
    at_once = [size for size in sizes if size > rows]
    assert at_once and len(sizes) == len(logits) + 5 + len(at_once)

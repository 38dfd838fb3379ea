"""Speculative decoding with the first MTP head of a model as its draft."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import train
from fnmodels import mtp
from tests.support.cases import attention_of, cost_of, generic_params, is_ordered, richest
from tests.support.mtp import mtp_cases, with_heads
from train.generation import speculative
from train.generation.speculative import speculate

V = 7  # few tokens, so that a head with random weights is often right
PROMPTS = [[1, 2, 3, 4, 5], [6], [5, 4, 3, 2, 1, 6, 5, 4, 3], [3, 3]]
NEW = [17, 9, 14, 12]
CASES = [next(case for case in mtp_cases() if case.name == name) for name in ("deepseek_v3", "glm4_moe", "qwen3_next")]
every_case = pytest.mark.parametrize("case", mtp_cases(), ids=str)


# By how many rows embeddings are moved where the heads with random weights are otherwise never right.
MOVED = {"axk1": 1, "sarvam_mla": 1, "hy_v3": 6, "mellum": 3, "ernie4_5_moe": 2}


def model(case: Any) -> tuple[Any, Any]:
    config = with_heads(replace(case.config, vocab_size=V), 2)  # the second head is not used
    params = generic_params(config)
    return params | {"embed_tokens": params["embed_tokens"].roll(MOVED.get(case.name, 0), 0)}, config


# One of each form of attention, with states and streams or without: what drafts leave in caches, and what is taken back
# where they are wrong, follows from these. The drafts of every model are tried one ahead.
DISTINCT = {
    (attention_of(case), is_ordered(case), bool(mtp.source_taps(with_heads(case.config, 2)))): case
    for case in sorted(mtp_cases(), key=cost_of, reverse=True)
    if case not in CASES[:2]
}.values()
GREEDY, DRAWN = train.Sampling(temperature=0), train.Sampling(top_k=4)


@pytest.mark.parametrize(
    ("case", "sampling", "ahead"),
    [
        *[(CASES[0], GREEDY, 3), (CASES[0], DRAWN, 1), (CASES[1], GREEDY, 1), (CASES[1], DRAWN, 3)],
        *[(case, GREEDY, 3) for case in DISTINCT],
    ],
    ids=["greedy, 3 ahead", "drawn, 1 ahead", "greedy, 1 ahead", "drawn, 3 ahead"]
    + [f"{case}, 3 ahead" for case in DISTINCT],
)
def test_answers_are_the_plain_ones(case: Any, sampling: train.Sampling, ahead: int) -> None:
    params, config = model(case)
    options: dict[str, Any] = {"max_new": NEW, "sampling": sampling, "seeds": 3}
    plain = train.generate(params, config, PROMPTS, **options)
    found, right = speculate(params, config, None, None, PROMPTS, ahead=ahead, **options)
    assert found.tokens == plain.tokens and 0 < right < 1
    for a, b in zip(found.logp, plain.logp, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@every_case
def test_drafts_are_those_of_the_head_without_a_cache(case: Any) -> None:
    """The share of drafts that are right is that of the head's predictions over the full answers, the plain ones."""
    params, config = model(case)
    found, right = speculate(params, config, None, None, PROMPTS, ahead=1, max_new=NEW, sampling=GREEDY)
    assert found.tokens == train.generate(params, config, PROMPTS, max_new=NEW, sampling=GREEDY).tokens
    drafted = hits = 0
    for prompt, tokens in zip(PROMPTS, found.tokens, strict=True):
        predicted, at = head_predictions(params, config, prompt + tokens), 0
        while at < len(tokens) - 1:  # the last token needs no draft
            place = len(prompt) + at - 2  # a head at a position predicts the token two after it
            hit = (predicted[place] if place >= 0 else 0) == tokens[at]  # equal logits: the lowest id
            drafted, hits, at = drafted + 1, hits + hit, at + 1 + hit
    assert right == hits / drafted and hits > 1


@pytest.mark.parametrize("name", ["deepseek_v4", "qwen4_exp_ngrams"])
def test_a_second_draft_goes_on_from_the_streams_of_the_head(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which stand, without a cache, behind those of the model; from its folded state the head would draft another."""
    params, config = model(next(case for case in mtp_cases() if case.name == name))
    params, prompt, drafted = {**params, "mtp": params["mtp"][:1]}, PROMPTS[0], []
    checked = speculative._checked

    def watched(logits: Tensor, tokens: Tensor, *rest: Any) -> Any:
        drafted.append(tokens[0].tolist())
        return checked(logits, tokens, *rest)

    monkeypatch.setattr(speculative, "_checked", watched)
    speculate(params, config, None, None, [prompt], ahead=2, max_new=3, sampling=GREEDY)
    row, how = torch.tensor([prompt]), {"config": config}
    with torch.no_grad():
        x, tapped = fnmodels.hidden(params, *fnmodels.prepare(config, row[:, :-1]), taps=mtp.source_taps(config), **how)
        source, next_tokens, found = mtp.read(x, tapped, config), row[:, 1:], []
        for _ in range(2):
            same = torch.ones_like(next_tokens)  # what the head reads of positions is their number
            _, masks, freqs = fnmodels.prepare(config, same)
            (state,), tapped = mtp.hidden(
                params, source, next_tokens[..., None], masks, freqs, taps=("streams",), **how
            )
            logits = fnmodels.family_of(config).unembed(mtp.view(params, 0), state, config=config)
            found.append(int(logits[0, -1].argmax()))
            source = torch.cat((source, tapped["mtp.0.streams"][:, -1:]), 1)
            next_tokens = torch.cat((next_tokens, torch.tensor([found[-1:]])), 1)
    assert drafted[0] == [prompt[-1], *found]


def head_predictions(params: Any, config: Any, tokens: list[int]) -> list[int]:
    row = torch.tensor([tokens])
    prepared = fnmodels.prepare(config, row)
    with torch.no_grad():
        taps = mtp.source_taps(config)
        found: Any = fnmodels.hidden(params, *prepared, config=config, taps=taps)
        x: Tensor = mtp.read(*(found if taps else (found, {})), config)
        after = mtp.ahead(row, torch.ones_like(row), 1, fill=-1)
        (state, *_) = mtp.hidden({**params, "mtp": params["mtp"][:1]}, x, after, *prepared[1:], config=config)
        logits = fnmodels.family_of(config).unembed(mtp.view(params, 0), state, config=config)
    best: list[int] = logits[0].argmax(-1).tolist()
    return best


def test_drawn_answers_have_the_models_distribution() -> None:
    params, config = model(CASES[0])
    rows = 2000
    found, _ = speculate(params, config, None, None, [[1, 2, 3]] * rows, max_new=2, ahead=1)
    counts = torch.zeros(V, V, dtype=torch.float64)
    for first, second in found.tokens:
        counts[first, second] += 1
    pairs = torch.tensor([[1, 2, 3, token] for token in range(V)])
    logits = fnmodels.forward(params, *fnmodels.prepare(config, pairs), config=config).detach().double()
    expected = rows * logits[0, 2].softmax(0)[:, None] * logits[:, 3].softmax(1)
    assert float(((counts - expected) ** 2 / expected).sum()) < 85.4  # 0.1 % of chi-square, 48 degrees of freedom


def test_what_an_mtp_head_cannot_do() -> None:
    plain = next(case for case in richest() if case.family == "llama")
    with pytest.raises(ValueError, match="params has none"):
        speculate(generic_params(plain.config), plain.config, None, None, PROMPTS, max_new=2)
    params, config = model(CASES[0])
    with pytest.raises(ValueError, match="without layer_fn"):
        speculate(params, config, None, None, PROMPTS, max_new=2, layer_fn=lambda block: block)

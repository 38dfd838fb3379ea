"""Generation of every causal family: its tokens and log-probabilities are those of one pass over all that is known."""

from dataclasses import replace

import pytest
import torch

import fnmodels
import train
from tests.support.cases import Case, causal, generic_params, layer_structures
from train.generation.batching import BatchSettings, ContinuousBatch
from train.generation.checks import check_request
from train.generation.requests import Event, Request

CASES = [case for case in layer_structures() if causal(case)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_are_those_of_the_forward_pass(case: Case) -> None:
    """Prompts of uneven lengths in fewer slots than prompts, over windows and chunks."""
    params = generic_params(case.config)
    prompts = [[3, 5, 2], [7], [4, 4, 9, 1, 8, 2, 6]]
    found = train.generate(
        params, case.config, prompts, max_new=[6, 9, 3], sampling=train.Sampling(temperature=0), slots=2, chunk=5
    )
    for prompt, tokens, logp in zip(prompts, found.tokens, found.logp, strict=True):
        row = torch.tensor([prompt + tokens])
        # as long as the request: rotary scalings may read the length
        prepared = fnmodels.prepare(case.config, row[:, :-1], length=row.shape[1])
        logits = fnmodels.forward(params, *prepared, config=case.config)[0, len(prompt) - 1 :].detach()
        chosen = logits.gather(1, row[0, len(prompt) :, None])[:, 0]
        assert bool((chosen >= logits.amax(1) - 1e-4 * logits.abs().amax()).all())
        torch.testing.assert_close(logp, chosen - logits.logsumexp(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
@torch.no_grad()
def test_a_next_turn_goes_on_from_the_cache_of_the_last_one(case: Case) -> None:
    """Turns of uneven lengths beside a new prompt have the tokens of requests that compute all of their prompts."""
    params = generic_params(case.config)
    first = [Request([3, 5, 2], 4, seed=1, keep=True, length=40), Request([7] * 9, 7, seed=2, keep=True, length=40)]
    if hasattr(fnmodels.family_of(case.config), "prompt_masks"):
        with pytest.raises(ValueError, match="a decoder reads from left to right"):
            check_request(0, first[0], case.config)
        return
    batch = ContinuousBatch(params, case.config, slots=3, capacity=40, settings=BatchSettings(chunk=5))
    said = _drawn(batch, first)
    new = [[4, 4, 9, 1, 8], [6]]
    turns = [
        replace(one, prompt=[*one.prompt, *(event.token for event in events), *more], held=events[-1].held)
        for one, events, more in zip(first, said, new, strict=True)
    ]
    turns.insert(1, Request([1, 2, 3, 4, 5, 6], 5, seed=4, length=40))
    before = batch.computed
    gone_on = _drawn(batch, turns)
    assert batch.computed - before == sum(len(more) for more in new) + 5
    anew = ContinuousBatch(params, case.config, slots=3, capacity=40)
    for one, other in zip(gone_on, _drawn(anew, [replace(turn, held=None) for turn in turns]), strict=True):
        assert [event.token for event in one] == [event.token for event in other]
        assert [event.logp for event in one] == pytest.approx([event.logp for event in other], rel=1e-4, abs=1e-4)


def _drawn(batch: ContinuousBatch, requests: list[Request]) -> list[list[Event]]:
    found: list[list[Event]] = [[] for _ in requests]
    for row, request in enumerate(requests):
        check_request(row, request, batch._config)
    batch.take(list(enumerate(requests)))
    while batch.busy:
        for event in batch.advance():
            found[event.row].append(event)
    return found

"""Generation of every causal family: greedy tokens and their log-probabilities are those of one forward pass."""

import pytest
import torch

import fnmodels
import train
from tests.support.cases import Case, causal, generic_params, richest

CASES = [case for case in richest() if causal(case)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_are_those_of_the_forward_pass(case: Case) -> None:
    """Prompts of uneven lengths in fewer slots than prompts, over windows and chunks."""
    params = generic_params(case.config)
    prompts = [[3, 5, 2], [7], [4, 4, 9, 1, 8, 2, 6]]
    found = train.generate(
        params, case.config, prompts, max_new=[9, 12, 5], sampling=train.Sampling(temperature=0), slots=2, chunk=5
    )
    for prompt, tokens, logp in zip(prompts, found.tokens, found.logp, strict=True):
        row = torch.tensor([prompt + tokens])
        # as long as the request: rotary scalings may read the length
        prepared = fnmodels.prepare(case.config, row[:, :-1], length=row.shape[1])
        logits = fnmodels.forward(params, *prepared, config=case.config)[0, len(prompt) - 1 :].detach()
        chosen = logits.gather(1, row[0, len(prompt) :, None])[:, 0]
        assert bool((chosen >= logits.amax(1) - 1e-4 * logits.abs().amax()).all())
        torch.testing.assert_close(logp, chosen - logits.logsumexp(1), rtol=1e-4, atol=1e-4)

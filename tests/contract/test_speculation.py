"""Speculative decoding of every form of cache, as the model and as its draft: the answers are the plain ones."""

import functools
from typing import Any

import pytest
import torch

import fnmodels
import train
from fnmodels.cache.rows import is_recurrent
from tests.support.cases import Case, attention_of, causal, generic_params, layer_structures, richest

PROMPTS = [[3, 5, 2], [1], [4, 4, 5, 1, 2, 2, 6]]


@functools.cache
def _cache_of(config: Any) -> Any:
    return fnmodels.init_cache(config, 1, 32, rings=False)


def _form(case: Case) -> str:
    """The layers' entries, where states stand beside keys or alone, and their rules.

    A draft that is refused is cut off the cache, which asks for nothing else of a model whose layers keep keys alone:
    test_cache.py cuts the cache of each structure, and runs it in pieces. `STATES` are made anew, each in its own way.
    """
    if not causal(case):
        return "none"
    return str((sorted({str(sorted(entry)) for entry in _cache_of(case.config).layers}), attention_of(case)))


CASES = [case for case in richest(_form) if causal(case)]
_CAUSAL = [case for case in layer_structures() if causal(case)]
STATES = [case for case in _CAUSAL if is_recurrent(_cache_of(case.config)) and case.name not in map(str, CASES)]


def _disturbed(params: Any, scale: float) -> Any:
    generator = torch.Generator().manual_seed(1)

    def noisy(p: Any) -> Any:
        drawn = p.is_floating_point() and p.numel() > 1
        return p + scale * p.std() * torch.randn(p.shape, generator=generator) if drawn else p

    return fnmodels.tree.map(noisy, params)


@pytest.mark.parametrize("case", [*CASES, *STATES], ids=str)
def test_speculate_of_every_form_of_cache_gives_the_plain_answers(case: Case) -> None:
    """The same structure drafts, with other parameters, so that drafts are taken and refused."""
    config, params = case.config, generic_params(case.config, torch.float64)
    options: dict[str, Any] = {"max_new": [6, 4, 5], "sampling": train.Sampling(temperature=0.7, top_k=3), "seeds": 2}
    plain = train.generate(params, config, PROMPTS, **options)
    for scale in (0.1, 0.03, 0.3):
        draft = _disturbed(params, scale)
        found, right = train.generation.speculate(params, config, draft, config, PROMPTS, ahead=3, chunk=6, **options)
        assert found.tokens == plain.tokens
        for one, other in zip(found.logp, plain.logp, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        if 0 < right < 1:
            return
    raise AssertionError("No draft was right now and then, so that nothing was taken and refused.")

"""A cache changes no result: what is generated step by step equals one forward pass, for every family."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from tests.support.cases import Case, causal, generic_params, off, structures, tokens_of

CASES = tuple(case for case in structures() if causal(case))
every_case = pytest.mark.parametrize("case", CASES, ids=str)


def stepped(params: Any, config: Any, cache: Any, tokens: Tensor, chunks: tuple[int, ...], **more: Any) -> Any:
    """(logits [B, S, V], the cache) after the tokens in these chunks."""
    logits = []
    for piece in tokens.split(list(chunks), dim=1):
        step = fnmodels.prepare_step(config, piece, cache)
        found, cache = fnmodels.decode(params, *step, cache, config=config, **more)
        logits.append(found)
    return torch.cat(logits, dim=1), cache


@every_case
def test_cached_equals_uncached(case: Case) -> None:
    config, tokens = case.config, tokens_of(case.config, 2, 24)
    params = generic_params(config, torch.float64)
    wanted = fnmodels.forward(params, *fnmodels.prepare(config, tokens, length=24), config=config, kernel="math")
    for chunks in ((24,), (7, 1, 9, 1, 6)):
        cache = fnmodels.init_cache(config, 2, 24, dtype=torch.float64)
        assert off(stepped(params, config, cache, tokens, chunks, kernel="math")[0], wanted) < 1e-12

"""Every family passes the property checks that are public (`fnmodels.testing`)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fnmodels
from fnmodels import testing
from tests.support import Case, causal, generic_params, structures


def subject_of(case: Case) -> testing.Subject:
    config = case.config

    def prepare(tokens: torch.Tensor, positions: torch.Tensor, segment_ids: torch.Tensor) -> Any:
        # the scalings whose definition needs a length get one: a row alone is not as long as a packed one
        return fnmodels.prepare(config, tokens, positions=positions, segment_ids=segment_ids, length=32)

    def forward(params: Any, batch: Any) -> torch.Tensor:
        return fnmodels.forward(params, *batch, config=config, kernel="math")

    return testing.Subject(generic_params(config), prepare, forward, vocab_size=config.vocab_size, causal=causal(case))


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("case", structures(), ids=str)
def test_check(case: Case, check: Callable[[testing.Subject], None]) -> None:
    check(subject_of(case))

"""Embeddings instead of tokens act as transformers' inputs_embeds: the model adds its positions and multipliers."""

import pytest
import torch

import fnmodels
from tests.support.cases import Case, cases, richest
from tests.support.oracle import assert_close, model_of, params_of

BY_TYPE = [case for case in richest(lambda case: case.config.model_type) if case.values is not None]


@pytest.mark.parametrize("case", BY_TYPE, ids=str)
def test_vectors_are_inputs_embeds(case: Case) -> None:
    model = model_of(case.values)
    vectors = torch.randn(2, 12, case.config.hidden_size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = model(inputs_embeds=vectors, use_cache=False).logits
    prepared = fnmodels.prepare(case.config, vectors)
    ours = fnmodels.forward(params_of(model, case.config), *prepared, config=case.config, kernel="math")
    assert_close(ours, theirs)


def test_every_family_is_compared() -> None:
    assert {case.family for case in BY_TYPE} == {case.family for case in cases()}

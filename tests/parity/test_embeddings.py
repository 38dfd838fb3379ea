"""Embeddings instead of tokens act as transformers' inputs_embeds: the model adds its positions and multipliers."""

import pytest
import torch

import fnmodels
from fnmodels.models.common.family import field_of, traits_of
from tests.support.cases import Case, cases, richest, tokens_of
from tests.support.oracle import assert_close, model_of, params_of

BY_TYPE = [case for case in richest(lambda case: case.config.model_type) if case.values is not None]


@pytest.mark.parametrize("case", BY_TYPE, ids=str)
def test_vectors_are_inputs_embeds(case: Case) -> None:
    model = model_of(case.values)
    width = getattr(case.config, "embedding_size", 0) or case.config.hidden_size
    vectors = torch.randn(2, 12, width, generator=torch.Generator().manual_seed(0))
    inputs, masks, freqs_cis = fnmodels.prepare(case.config, vectors)
    more = {}
    if field_of(case.config, "ngram_size"):  # layers embed n-grams of the tokens
        with pytest.raises(ValueError, match="This model embeds n-grams of tokens: pass the inputs of"):
            fnmodels.forward(params_of(model, case.config), inputs, masks, freqs_cis, config=case.config)
        more["ple_input_ids"] = ids = tokens_of(case.config, 2, 12)
        of_ids = fnmodels.prepare(case.config, ids)[0]
        inputs |= {name: of_ids[name] for name in ("token_ids", "preceding")}
    elif traits_of(fnmodels.family_of(case.config)).reads_ids:
        with pytest.raises(ValueError, match="choose experts by token ids"):
            fnmodels.forward(params_of(model, case.config), inputs, masks, freqs_cis, config=case.config)
        return
    if hasattr(getattr(model, "model", None), "get_per_layer_inputs"):  # embeddings of the tokens for each layer
        inputs["token_ids"] = ids = tokens_of(case.config, 2, 12)
        with torch.no_grad():
            more["per_layer_inputs"] = model.model.get_per_layer_inputs(ids)
    with torch.no_grad():
        theirs = model(inputs_embeds=vectors, use_cache=False, **more).logits
    params = params_of(model, case.config)
    ours = fnmodels.forward(params, inputs, masks, freqs_cis, config=case.config, kernel="math")
    assert_close(ours, theirs)


def test_every_family_is_compared() -> None:
    """But those that transformers does not have."""
    assert {case.family for case in BY_TYPE} == {case.family for case in cases()} - {
        "bailing_moe",
        "deepseek_v41",
        "kimi_k3",
        "llada",
        "nemotron_nas",
        "ouro",
        "rwkv7",
    }

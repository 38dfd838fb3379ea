"""What GPT-2 alone has: positions that are learned, and scores scaled by the number of the layer."""

from typing import Any

import pytest
import torch

import fnmodels
from tests.support.cases import cases, generic_params, tokens_of

CASES = {case.name: case for case in cases() if case.family == "gpt2"}


def test_bare_tokens_do_not_say_where_they_stand() -> None:
    config = CASES["gpt2"].config
    tokens, weights = tokens_of(config, 2, 5), generic_params(config)
    inputs, masks, freqs_cis = fnmodels.prepare(config, tokens)
    with pytest.raises(ValueError, match="`prepare`"):
        fnmodels.forward(weights, tokens, masks, freqs_cis, config=config)
    x = fnmodels.family_of(config).embed(weights, inputs, config=config)
    assert torch.equal(x, weights["embed_tokens"][tokens] + weights["embed_positions"][inputs["positions"]])
    vectors = weights["embed_tokens"][tokens]  # positions are added to them, as to transformers' inputs_embeds
    assert torch.equal(
        fnmodels.forward(weights, {**inputs, "tokens": vectors}, masks, freqs_cis, config=config),
        fnmodels.forward(weights, inputs, masks, freqs_cis, config=config),
    )
    with pytest.raises(ValueError, match="bare token ids or vectors do not say where they stand"):
        fnmodels.forward(weights, vectors, masks, freqs_cis, config=config)


def test_a_position_that_nobody_learned() -> None:
    config = CASES["gpt2"].config
    with pytest.raises(ValueError, match="The positions go from 0 to 64, but the model knows those from 0 to 63"):
        fnmodels.forward(
            generic_params(config), *fnmodels.prepare(config, tokens_of(config, 1, 65)), config=config, kernel="math"
        )


def test_each_layer_has_its_scale() -> None:
    config = CASES["gpt2_numbered"].config
    freqs_cis: Any
    _, masks, freqs_cis = fnmodels.prepare(config, tokens_of(config, 2, 5))
    assert list(freqs_cis) == ["full_0", "full_1", "full_2"] and len({id(mask) for mask in masks.values()}) == 1
    for i, table in enumerate(freqs_cis.values()):
        assert torch.equal(table["scale"], torch.full((2, 5), 1 / (i + 1)))


def test_two_names_of_one_size() -> None:
    values = CASES["gpt2"].values
    usual = {name: value for name, value in values.items() if name != "n_embd"} | {"hidden_size": values["n_embd"]}
    read = fnmodels.family_for("gpt2").Config.from_hf
    assert read(usual) == read({**values, "hidden_size": values["n_embd"]}) == read(values)
    with pytest.raises(fnmodels.errors.ConfigError, match="'n_embd' is 32 and 'hidden_size' is 48"):
        read({**values, "hidden_size": 48})
    with pytest.raises(fnmodels.errors.ConfigError, match="cannot be split into heads"):
        read({**values, "n_head": 5})


def test_saved_for_others() -> None:
    """What asks another implementation for fp32 scores changes nothing here, and is not lost."""
    values = CASES["gpt2"].values
    config = fnmodels.family_for("gpt2").Config.from_hf({**values, "reorder_and_upcast_attn": True})
    assert config == CASES["gpt2"].config and config.to_hf()["reorder_and_upcast_attn"] is True

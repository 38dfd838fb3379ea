"""Training with dropout is that of transformers, for every model type whose files state a rate.

Places and rates are compared exactly, by masks that are fixed numbers in both libraries. Mean and variance of the
logits over random masks, of which each row of a batch has its own, are compared too.
"""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels.models.common.dropout import dropout_table
from fnmodels.models.common.family import traits_of
from fnmodels.ops.dropout import Dropout
from tests.support.cases import Case, block_of, cases, cost_of, is_ordered, seed_of, tokens_of
from tests.support.dropouts import apart, check_places, fixed_dropout, off, scaled
from tests.support.oracle import assert_close, model_of, params_of

MASKS, LENGTH, RATES = 1000, 5, (0.3, 0.2, 0.15)
MPT = {"clip_qkv": 1.5, "softmax_scale": 0.3}
# Types without a table of rates: {type: why}.
UNSTATED = {"falcon": "transformers applies its rates in part", "mpt": "its rate is in attn_config, see `case_of`"}
UNSTATED |= {"deepseek_v4": "files with a rate above 0 are refused"}
UNSTATED |= dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), "nothing is dropped")
# Types whose attention transformers trains without dropout, whatever their files state: {type: why}.
IGNORED = dict.fromkeys(("lfm2", "lfm2_moe"), "its attention passes dropout=0.0")
IGNORED |= dict.fromkeys(("ernie4_5", "ernie4_5_moe"), "its attention sets attention_dropout = 0.0")
# Types whose weights of attention lie otherwise in memory, where fixed masks differ; moments are compared.
BY_WINDOW = ("longformer",)
# {type: the class of its modules that draw numbers in training by themselves}: they run as in evaluation here.
DRAWING = {"phimoe": "PhimoeTopKRouter"}


@functools.cache
def types() -> dict[str, Case]:
    """{model type with a config.json that transformers reads, and rates: its first variant}."""
    found: dict[str, Case] = {}
    for case in cases():
        if case.values is not None and hasattr(case.config, "dropout"):
            found.setdefault(case.values["model_type"], case)
    return {name: case for name, case in found.items() if name == "mpt" or dropout_table(case.config)}


every_type = pytest.mark.parametrize("model_type", types())


def test_types_without_a_rate_are_named() -> None:
    stated = [case for case in cases() if case.values is not None]
    without = [case for case in stated if not (hasattr(case.config, "dropout") and dropout_table(case.config))]
    assert {case.values["model_type"] for case in without} == UNSTATED.keys()
    assert {*IGNORED, *DRAWING} <= types().keys()


@pytest.mark.parametrize("model_type", DRAWING)
def test_modules_that_draw_by_themselves_do(model_type: str) -> None:
    p = Problem(model_type)
    for module in p.model.modules():
        module.train(type(module).__name__ == DRAWING[model_type])
    torch.manual_seed(0)
    with torch.no_grad():
        one, other = p._logits(p.tokens), p._logits(p.tokens)
    assert off(one, other) > 1e-3


def case_of(model_type: str) -> Case:
    """The type's variant with rates that differ by name."""
    found = types()[model_type]
    values = found.values | dict(zip(dropout_table(found.config), RATES, strict=False))
    if model_type == "mpt":
        values["attn_config"] = MPT | {"attn_pdrop": 0.2}
    return dataclasses.replace(found, values=values, config=type(found.config).from_hf(values))


class Problem:
    """One type's model in training, here and in transformers."""

    def __init__(self, model_type: str) -> None:
        self.case = case_of(model_type)
        self.config, values = self.case.config, self.case.values
        self.model: Any = model_of(values | ({"attn_config": MPT} if model_type == "mpt" else {})).train()
        self.params, self.tokens = (
            params_of(self.model, self.config),
            tokens_of(self.config, 1, LENGTH, seed_of(self.case)),
        )
        if model_type == "mpt":  # whose config there takes whole numbers alone for the rate
            for module in self.model.modules():
                for name in {"attn_dropout_p", "hidden_dropout"} & vars(module).keys():
                    setattr(module, name, self.config.dropout.weights)
            for layer in self.model.transformer.blocks:
                layer.resid_attn_dropout.p = self.config.dropout.attention
        drawing = [m for m in self.model.modules() if type(m).__name__ == DRAWING.get(model_type)]
        assert bool(drawing) == (model_type in DRAWING)
        for module in drawing:
            module.eval()
        causal = traits_of(fnmodels.family_of(self.config)).causal
        self.cached: dict[str, Any] = {"use_cache": False} if causal else {}

    @torch.no_grad()
    def theirs(self, rows: int = 1) -> Tensor:
        torch.manual_seed(0)
        tokens = self.tokens.expand(rows, -1)
        if rows > 1 and self.case.values["model_type"] == "deberta-v2":  # which has one mask of distances for a batch
            return torch.func.vmap(self._logits, randomness="different")(tokens[:, None])[:, 0]
        return self._logits(tokens)

    def _logits(self, tokens: Tensor) -> Tensor:
        there = {} if self.cached else {"attention_mask": torch.ones_like(tokens)}
        return self.model(input_ids=tokens, **there, **self.cached).logits

    @torch.no_grad()
    def ours(self, dropout: Dropout, rows: int = 1) -> Tensor:
        config = dataclasses.replace(self.config, dropout=dropout)
        inputs, masks, freqs_cis = fnmodels.prepare(config, self.tokens.expand(rows, -1), rng=1)
        return fnmodels.forward(self.params, inputs, masks, freqs_cis, config=config)


def is_near(one: Tensor, other: Tensor) -> bool:
    means, variances = apart(one, other)
    return means < 1.6 and abs(variances) < 0.06


@every_type
def test_the_same_tensors_are_dropped_at_the_same_rates_as_in_transformers(model_type: str) -> None:
    p = Problem(model_type)
    rates = p.config.dropout
    if model_type in BY_WINDOW:
        rates = dataclasses.replace(rates, weights=0.0)
        for layer in p.model.longformer.encoder.layer:
            layer.attention.self.dropout = 0.0
    with fixed_dropout():
        theirs = p.theirs()
        if model_type in IGNORED:
            assert_close(p.ours(Dropout()), theirs)
            assert off(p.ours(rates), theirs) > 1e-2
            return
        check_places(p.ours, rates, theirs)


# One type of each block and set of rates, and of these the cheapest of each set, with attention alone and with states.
# The test above has each place and rate of every type; how a mask is drawn follows from the rate and the shape.
_OF_BLOCKS = {
    (block_of(case), str(dropout_table(case.config))): name for name, case in types().items() if name not in IGNORED
}
_BY_COST = sorted(_OF_BLOCKS.values(), key=lambda name: cost_of(types()[name]), reverse=True)
DISTINCT = {(str(dropout_table(types()[name].config)), is_ordered(types()[name])): name for name in _BY_COST}


@pytest.mark.parametrize("model_type", sorted({*DISTINCT.values(), *BY_WINDOW}))
def test_training_with_dropout_is_distributed_as_in_transformers(model_type: str) -> None:
    p = Problem(model_type)
    rates = p.config.dropout
    ours, theirs = p.ours(rates, MASKS), p.theirs(MASKS)
    assert is_near(ours, theirs), apart(ours, theirs)
    assert not is_near(p.ours(scaled(rates, 0.7), MASKS), theirs)

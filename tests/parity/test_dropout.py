"""Training with dropout is distributed as in transformers: mean and variance of the logits over masks.

Both run one input in many rows of a batch, which have masks of their own.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
from fnmodels.models.common.dropout import dropout_table
from fnmodels.models.common.family import traits_of
from fnmodels.ops.dropout import Dropout
from tests.support.cases import Case, cases, tokens_of
from tests.support.oracle import model_of, params_of

ROWS, LENGTH, RATES = 3000, 5, (0.3, 0.2, 0.15)
TYPES = ("gpt2", "bert", "roberta", "distilbert", "mpnet", "nomic_bert", "modernbert", "eurobert", "gpt_neox", "phi")
TYPES += ("phi3", "starcoder2", "stablelm", "llama", "seed_oss", "mistral", "qwen3", "mixtral", "gemma2", "olmo2")
TYPES += ("gptj", "codegen", "gpt_neo", "gpt_bigcode", "opt", "xglm", "persimmon", "bloom")
TYPES += ("cohere", "granite", "deepseek_v3", "gpt_oss", "gte", "esm", "albert", "electra", "biogpt", "mpt")
MPT = {"clip_qkv": 1.5, "softmax_scale": 0.3}


def case_of(model_type: str) -> Case:
    found = next(case for case in cases() if case.values and case.values["model_type"] == model_type)
    table = dropout_table(found.config)
    names = [name for name in table if name != "residual_dropout" or model_type in ("seed_oss", "starcoder2")]
    values = found.values | dict(zip(names, RATES, strict=False))
    if model_type == "mpt":
        values["attn_config"] = MPT | {"attn_pdrop": 0.2}
    return dataclasses.replace(found, values=values, config=type(found.config).from_hf(values))


def theirs_of(case: Case, model: Any, tokens: Tensor) -> Tensor:
    if case.values["model_type"] == "mpt":  # whose config there takes whole numbers alone for the rate
        for module in model.modules():
            for name in {"attn_dropout_p", "hidden_dropout"} & vars(module).keys():
                setattr(module, name, case.config.dropout.weights)
        for layer in model.transformer.blocks:
            layer.resid_attn_dropout.p = case.config.dropout.attention
    torch.manual_seed(0)
    cached = {} if not traits_of(fnmodels.family_of(case.config)).causal else {"use_cache": False}
    with torch.no_grad():
        return model.train()(input_ids=tokens, **cached).logits


def ours_of(config: Any, params: Any, tokens: Tensor) -> Tensor:
    inputs, masks, freqs_cis = fnmodels.prepare(config, tokens, rng=1)
    with torch.no_grad():
        return fnmodels.forward(params, inputs, masks, freqs_cis, config=config)


def apart(one: Tensor, other: Tensor) -> tuple[float, float]:
    """(root mean square of the means' difference in standard errors, ratio of the variances - 1)."""
    one, other = one.double(), other.double()
    variances = one.var(0), other.var(0)
    errors = (one.mean(0) - other.mean(0)).square() / (sum(variances) / ROWS).clamp(min=1e-12)
    return float(errors.mean().sqrt()), float(variances[0].sum() / variances[1].sum()) - 1


@pytest.mark.parametrize("model_type", TYPES)
def test_training_with_dropout_is_distributed_as_in_transformers(model_type: str) -> None:
    case = case_of(model_type)
    model = model_of(case.values | ({"attn_config": MPT} if model_type == "mpt" else {}))
    params, tokens = params_of(model, case.config), tokens_of(case.config, 1, LENGTH).expand(ROWS, LENGTH)
    theirs = theirs_of(case, model, tokens)
    means, variances = apart(ours_of(case.config, params, tokens), theirs)
    print(model_type, means, variances)
    assert means < 1.5 and abs(variances) < 0.08, (means, variances)

    rates = dataclasses.asdict(case.config.dropout)
    for place in (name for name, rate in rates.items() if rate):  # planted: a place that is forgotten
        less = dataclasses.replace(case.config, dropout=Dropout(**rates | {place: 0.0}))
        means, variances = apart(ours_of(less, params, tokens), theirs)
        assert means > 1.5 or abs(variances) > 0.08, (place, means, variances)

"""MTP heads equal those of transformers, which loads them from the files that `params.save_pretrained` writes.

The patterns of transformers for the published tensor names contain the published layer counts; the test replaces them.
"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

import fnmodels
import params as P
from fnmodels import mtp
from tests.support.cases import Case, cases, generic_params, tokens_of
from tests.support.oracle import assert_close

HEADS, LENGTH = 2, 20
FAMILIES = ("deepseek_v3", "deepseek_v3_no_latent", "deepseek_v3_biases", "glm4_moe", "glm4_moe_qk_norm")


@pytest.mark.parametrize("case", [case for case in cases() if case.name in FAMILIES], ids=str)
def test_heads(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(case.config, num_nextn_predict_layers=HEADS)
    weights = generic_params(config)
    P.save_pretrained(tmp_path, config, weights)
    eager: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    layers = "|".join(str(config.num_hidden_layers + k) for k in range(HEADS))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **eager).eval()
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.({layers})\."])
    heads = MtpModel.from_pretrained(model).eval()

    tokens = tokens_of(config, 1, LENGTH)
    prepared = fnmodels.prepare(config, tokens)
    x = fnmodels.hidden(weights, *prepared, config=config, kernel="math")
    ahead = mtp.ahead(tokens, torch.ones_like(tokens), HEADS, fill=-1)
    states = mtp.hidden(weights, x, ahead, *prepared[1:], config=config, kernel="math")
    family = fnmodels.family_of(config)
    with torch.no_grad():
        theirs = model(tokens, use_cache=False, output_hidden_states=True).hidden_states[-1]
        for k, state in enumerate(states):
            places = LENGTH - k - 1  # head k reads the tokens from k + 1 on, at the positions of these
            positions = torch.arange(k + 1, LENGTH)[None]
            theirs = heads.forward_layer(k, theirs[:, :places], positions, None, input_ids=tokens[:, k + 1 :])
            logits = family.unembed(mtp.view(weights, k), state, config=config)
            assert_close(logits[:, :places], model.lm_head(theirs))

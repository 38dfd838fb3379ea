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
APART = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "hy_v3")  # whose heads transformers does not read
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


@pytest.mark.parametrize("case", [case for case in cases() if case.name in APART], ids=str)
def test_a_head_is_a_model_of_one_layer(case: Case, tmp_path: Path) -> None:
    """The block and the norm of a head, as the only layer and the norm of a model of transformers."""
    config = dataclasses.replace(case.config, num_nextn_predict_layers=1)
    weights = generic_params(config)
    head = weights["mtp"][0]
    one = dataclasses.replace(case.config, num_hidden_layers=1, layer_kinds=config.layer_kinds[-1:])
    outside = {name: leaf for name, leaf in weights.items() if name not in ("mtp", "layers", "norm")}
    P.save_pretrained(tmp_path / "model", case.config, {name: leaf for name, leaf in weights.items() if name != "mtp"})
    P.save_pretrained(tmp_path / "head", one, {**outside, "layers": [head["block"]], "norm": head["norm"]})
    eager: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model, block = (AutoModelForCausalLM.from_pretrained(tmp_path / part, **eager).eval() for part in ("model", "head"))
    first = 0.0 if case.family == "exaone_moe" else 1.0  # what is added to the weights of norms

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * (first + head[name])

    tokens = tokens_of(config, 1, LENGTH)
    with torch.no_grad():
        state = model.model(tokens, use_cache=False).last_hidden_state[:, :-1]
        token = model.get_input_embeddings()(tokens[:, 1:])
        x = torch.cat((norm(token, "enorm"), norm(state, "hnorm")), -1) @ head["eh_proj"].mT
        wanted = block(inputs_embeds=x, use_cache=False).logits
    prepared = fnmodels.prepare(config, tokens)
    ahead = mtp.ahead(tokens, torch.ones_like(tokens), 1, fill=-1)
    x = fnmodels.hidden(weights, *prepared, config=config, kernel="math")
    (state,) = mtp.hidden(weights, x, ahead, *prepared[1:], config=config, kernel="math")
    logits = fnmodels.family_of(config).unembed(mtp.view(weights, 0), state, config=config)
    assert_close(logits[:, :-1], wanted)

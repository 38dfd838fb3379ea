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
from fnmodels.models.common.family import function_of, traits_of
from fnmodels.models.common.mtp import blocks, kinds_of
from fnmodels.ops.norm import rms_norm_zero_centered
from tests.support.cases import Case, cases, generic_params, tokens_of
from tests.support.mtp import mtp_cases, with_heads
from tests.support.oracle import assert_close

HEADS, LENGTH = 2, 20
ELSEWHERE = ("kimi_k2", "minimax_m3_wrapped")  # of deepseek_v3 and minimax_m3 in transformers, under other names
ELSEWHERE += ("bailing_moe", "bailing_moe_v2")  # not in transformers: tests/fnmodels/models/test_bailing_moe.py
ELSEWHERE += ("longcat_flash_biases",)  # whose block is half of a layer: tests/fnmodels/models/test_longcat_flash.py
ELSEWHERE += ("hy_v4", "hy_v4_vl_text")  # whose block is no layer of the model: tests/fnmodels/models/test_hy_v4.py
ELSEWHERE += ("glm5_next", "glm5_next_wrapped")  # neither: tests/fnmodels/models/test_glm5_next_head.py
STREAMS = [case.name for case in mtp_cases() if traits_of(fnmodels.family_of(case.config)).mtp_reads == "streams"]
ELSEWHERE += tuple(STREAMS)  # whose blocks begin with streams: tests/parity/test_mtp_streams.py
FAMILIES = ("deepseek_v3", "deepseek_v3_no_latent", "deepseek_v3_biases", "glm4_moe", "glm4_moe_qk_norm", "mellum")


@pytest.mark.parametrize("case", [case for case in cases() if case.name in FAMILIES], ids=str)
def test_heads(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_heads(case.config, HEADS)
    count = config.num_nextn_predict_layers
    weights = generic_params(config)
    P.save_pretrained(tmp_path, config, weights)
    eager: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
    layers = "|".join(str(config.num_hidden_layers + k) for k in range(count))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, **eager).eval()
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.({layers})\.", r"^mtp\."])
    heads = MtpModel.from_pretrained(model).eval()

    tokens = tokens_of(config, 1, LENGTH)
    prepared = fnmodels.prepare(config, tokens)
    x = fnmodels.hidden(weights, *prepared, config=config, kernel="math")
    ahead = mtp.ahead(tokens, torch.ones_like(tokens), count, fill=-1)
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


@pytest.mark.parametrize("case", [case for case in mtp_cases() if case.name not in (*FAMILIES, *ELSEWHERE)], ids=str)
def test_a_head_is_a_model(case: Case, tmp_path: Path) -> None:
    """The block and the norm of each head, as the layers and the norm of a model of transformers.

    What stands around the block is written out: norms of the token's embedding and of the states, in this order, and a
    projection, as in each of the implementations that the families cite.
    """
    config = with_heads(case.config, HEADS)
    weights = generic_params(config)
    outside = {name: leaf for name, leaf in weights.items() if name not in ("mtp", "layers", "norm", "lm_head")}
    P.save_pretrained(tmp_path / "model", case.config, {name: leaf for name, leaf in weights.items() if name != "mtp"})
    family = fnmodels.family_of(config)
    first = 1.0 if function_of(family, "stream_norm") is rms_norm_zero_centered else 0.0
    reads = traits_of(family).mtp_reads

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + mtp.norm_eps(config)).rsqrt() * (first + weight)

    def loaded(folder: Path) -> Any:
        eager: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager"}
        return AutoModelForCausalLM.from_pretrained(folder, **eager).eval()

    tokens = tokens_of(config, 1, LENGTH)
    prepared = fnmodels.prepare(config, tokens)
    x = fnmodels.hidden(weights, *prepared, config=config, kernel="math")
    ahead = mtp.ahead(tokens, torch.ones_like(tokens), len(weights["mtp"]), fill=-1)
    states = mtp.hidden(weights, x, ahead, *prepared[1:], config=config, kernel="math")
    model = loaded(tmp_path / "model")
    state = model.model(tokens, use_cache=False).last_hidden_state if reads != "raw" else x
    assert_close(norm(x, weights["norm"]), model.model(tokens, use_cache=False).last_hidden_state)
    for k, (head, ours) in enumerate(zip(weights["mtp"], states, strict=True)):
        kinds = kinds_of(config)
        one = dataclasses.replace(blocks(config)[0], num_hidden_layers=len(kinds), layer_kinds=kinds)
        one = dataclasses.replace(one, num_nextn_predict_layers=0)
        layers = head["block"] if isinstance(head["block"], list) else [head["block"]]
        ends = {name: head.get(name, weights.get(name)) for name in ("norm", "lm_head")}
        ends = {name: leaf for name, leaf in ends.items() if leaf is not None}
        P.save_pretrained(tmp_path / f"head{k}", one, {**outside, "layers": layers, **ends})
        block, places = loaded(tmp_path / f"head{k}"), LENGTH - k - 1
        with torch.no_grad():
            token = model.get_input_embeddings()(tokens[:, k + 1 :])
            both = torch.cat((norm(token, head["enorm"]), norm(state[:, :places], head["hnorm"])), -1)
            wanted = block(inputs_embeds=both @ head["eh_proj"].mT, use_cache=False)
            assert_close(family.unembed(mtp.view(weights, k), ours, config=config)[:, :places], wanted.logits)
        if reads == "chained":
            state = norm(ours, ends["norm"])
        elif reads == "raw":
            state = ours

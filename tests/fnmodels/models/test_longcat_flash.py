"""LongCat-Flash's MTP head: half of a layer of transformers on the projected token and state."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import fnmodels
import params as P
from fnmodels import mtp
from fnmodels.errors import ConfigError
from fnmodels.models.decoder import longcat_flash
from tests.support.cases import generic_params
from tests.support.oracle import assert_close
from tests.variants.longcat_flash import NGRAM, TINY


def test_the_head_is_half_of_a_layer_of_transformers(tmp_path: Path) -> None:
    """Modules of its first layer with the tensors of the head under their published names; norm and output after it."""
    config = replace(longcat_flash.Config.from_hf(TINY), num_nextn_predict_layers=1)
    params = generic_params(config)
    P.save_pretrained(tmp_path, config, params)
    held = load_file(tmp_path / "model.safetensors")
    head = {name.removeprefix("model.mtp."): leaf for name, leaf in held.items() if name.startswith("model.mtp.")}
    assert torch.equal(head["embed_tokens.weight"], params["embed_tokens"])
    inside = {name.removeprefix("layers.0."): leaf for name, leaf in head.items() if name.startswith("layers.0.")}

    tokens = torch.randint(3, 61, (1, 20), generator=torch.Generator().manual_seed(3))
    inputs, masks, freqs = fnmodels.prepare(config, tokens)
    x: Tensor = fnmodels.hidden(params, inputs, masks, freqs, config=config, kernel="math")
    ahead = mtp.ahead(tokens, torch.ones_like(tokens), 1, fill=-1)
    (state,) = mtp.hidden(params, x, ahead, masks, freqs, config=config, kernel="math")
    found = longcat_flash.unembed(mtp.view(params, 0), state, config=config)[:, :-1]

    theirs = transformers.AutoConfig.for_model(**TINY)
    model = transformers.AutoModelForCausalLM.from_config(theirs, attn_implementation="eager").eval()
    layer = model.model.layers[0]
    for name, module in (("self_attn", layer.self_attn[0]), ("transformer_layer.mlp", layer.mlps[0])):
        module.load_state_dict(
            {key.removeprefix(f"{name}."): leaf for key, leaf in inside.items() if key.startswith(f"{name}.")}
        )

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weight

    with torch.no_grad():
        token = norm(head["embed_tokens.weight"][tokens[:, 1:]], inside["enorm.m.weight"])
        before = norm(norm(x, params["norm"])[:, :-1], inside["hnorm.m.weight"])
        y = torch.cat((token, before), -1) @ inside["eh_proj.weight"].mT
        tables = model.model.rotary_emb(y, torch.arange(19)[None])
        mask = torch.full((19, 19), -torch.inf).triu(1)[None, None]
        y = y + layer.self_attn[0](norm(y, inside["input_layernorm.weight"]), tables, mask)[0]
        y = y + layer.mlps[0](norm(y, inside["post_attention_layernorm.weight"]))
        assert_close(found, norm(y, head["norm.weight"]) @ params["lm_head"].mT)


def test_files_with_n_grams_have_no_head() -> None:
    config = longcat_flash.Config.from_hf(NGRAM)
    assert config.num_nextn_predict_layers == 0 and longcat_flash.leftovers(config) == (r"model\.mtp\..*",)
    with pytest.raises(ConfigError, match="from 0 to 0"):
        replace(config, num_nextn_predict_layers=1)


def test_published_files_have_one_head() -> None:
    values = {name: value for name, value in TINY.items() if name != "num_nextn_predict_layers"}
    assert longcat_flash.Config.from_hf(values).num_nextn_predict_layers == 1

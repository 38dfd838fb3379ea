"""MiniMax-Text-01: lightning attention is the recurrence that its paper writes, and sublayers add by factors."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

import fnmodels
import params as P
from fnmodels.models.common.config_json import ConfigJson
from fnmodels.models.decoder import minimax
from fnmodels.ops import rms_norm
from tests.support.cases import batch_of, generic_params, off, segments
from tests.variants.minimax import TINY, as_remote_code, published

CONFIG = minimax.Config.from_hf(TINY)
ROWS = segments((5, 3), (-1, 6, 1))


def test_sublayers_add_to_their_normed_input() -> None:
    """In place of test_what_sublayers_add_is_what_the_taps_hold."""
    params, batch = generic_params(CONFIG), batch_of(CONFIG, ROWS)
    names = ("input", "attention", "middle", "mlp", "output")
    _, taps = batch.forward(params, taps=tuple(f"layers.*.{name}" for name in names))
    alphas = {True: CONFIG.linear_attn_alpha_factor, False: CONFIG.full_attn_alpha_factor}
    for i, kind in enumerate(CONFIG.layer_kinds):
        layer, tap = params["layers"][i], {name: taps[f"layers.{i}.{name}"][batch.valid] for name in names}

        def normed(x: Tensor, weight: Tensor) -> Tensor:
            return rms_norm(x, weight, eps=CONFIG.rms_norm_eps)

        alpha = alphas[kind.startswith("linear")]
        middle = alpha * normed(tap["input"], layer["input_layernorm"]) + tap["attention"]
        assert off(middle, tap["middle"]) < 1e-6
        output = CONFIG.mlp_alpha_factor * normed(middle, layer["post_attention_layernorm"]) + tap["mlp"]
        assert off(output, tap["output"]) < 1e-6


@pytest.mark.parametrize("layer", [0, 1])
def test_lightning_attention_is_its_recurrence(layer: int) -> None:
    """Token by token, each document from an empty state; arXiv 2501.08313 and the rates of the publisher's code."""
    params, batch = generic_params(CONFIG), batch_of(CONFIG, ROWS)
    names = tuple(f"layers.{layer}.{name}" for name in ("input", "attention"))
    _, taps = batch.forward(params, taps=names)
    weights, heads, H = params["layers"][layer]["attention"], CONFIG.num_attention_heads, CONFIG.head_dim
    x = rms_norm(taps[names[0]], params["layers"][layer]["input_layernorm"], eps=CONFIG.rms_norm_eps)
    q, k, v = (torch.nn.functional.silu(x @ weights[f"{n}_proj"].T).unflatten(-1, (heads, H)) for n in "qkv")
    factor = 1 - layer / (CONFIG.num_hidden_layers - 1 + 1e-5) + 1e-5
    decay = torch.exp(-torch.tensor([2.0 ** (-8 * (h + 1) / heads) * factor for h in range(heads)]))[:, None, None]
    for row, ids in enumerate(ROWS.tolist()):
        state, document = torch.zeros(heads, H, H), 0
        for t, segment in enumerate(ids):
            if not segment:
                continue
            state, document = state * (segment == document) * decay, segment
            state = state + k[row, t][:, :, None] * v[row, t][:, None, :]
            read = (q[row, t][:, None] @ state).flatten()
            gated = torch.sigmoid(x[row, t] @ weights["z_proj"].T) * rms_norm(read, weights["norm"], eps=1e-6)
            found = taps[names[1]][row, t] / CONFIG.linear_attn_beta_factor
            assert off(gated @ weights["o_proj"].T, found) < 1e-5


def test_the_published_rotary_dim_is_followed() -> None:
    """transformers 5.24 ignores it, and rotates whole heads."""
    config = minimax.Config.from_hf(published()["minimax_text_01"])
    assert config.rope.partial == 0.5 and config == fnmodels.preset("minimax-text-01")
    with pytest.raises(P.UnsupportedError, match="'rotary_dim' and 'partial_rotary_factor' disagree"):
        minimax.Config.from_hf(published()["minimax_text_01"] | {"partial_rotary_factor": 0.25})
    half = dataclasses.replace(CONFIG.rope, partial=0.4)
    table = minimax.freqs_cis(dataclasses.replace(CONFIG, rope=half), torch.arange(4)[None])["full_moe"]
    assert table.shape == (1, 4, 2, 2)


def test_kinds_of_files_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(P.UnsupportedError, match="'attn_type_list' is"):
        minimax.Config.from_hf(TINY | {"attn_type_list": [1, 0, 0]})


REMOTE = {"minimax_text_01": "MiniMaxText01ForCausalLM", "minimax_m1": "MiniMaxM1ForCausalLM"}


@pytest.mark.parametrize("model_type", REMOTE)
def test_the_publishers_dialect_says_the_same_and_is_saved_in_todays(model_type: str, tmp_path: Path) -> None:
    """Names and defaults of configuration_minimax_text_01.py and modeling_minimax_text_01.py."""
    text_01 = published()["minimax_text_01"]
    published_file = as_remote_code(text_01, model_type, REMOTE[model_type])
    (tmp_path / "config.json").write_text(json.dumps(published_file))
    assert P.load_config(tmp_path) == fnmodels.preset("minimax-text-01")
    theirs = as_remote_code(TINY, model_type, REMOTE[model_type]) | {"block_size": 7}
    config = minimax.Config.from_hf(theirs)  # six factors that differ
    saved = config.to_hf()
    assert config == CONFIG and saved["model_type"] == "minimax" and saved["architectures"] == ["MiniMaxForCausalLM"]
    P.save_pretrained(tmp_path / "ours", CONFIG, P.init(CONFIG, 0))
    (tmp_path / "ours/config.json").write_text(json.dumps(theirs))
    assert P.load_pretrained(tmp_path / "ours")[0] == CONFIG
    assert minimax.Config.from_hf(saved) == CONFIG and not any(name.startswith("layernorm") for name in saved)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"postnorm": None}, "'postnorm' is false; only true"),
        ({"attn_type_list": None}, "has no 'attn_type_list'"),
        ({"attn_type_list": [0, 1]}, r"'attn_type_list' is \[0, 1\]; it must have 0 .* for each of 3 layers"),
        ({"attn_type_list": [0, 2, 1]}, r"'attn_type_list' is \[0, 2, 1\]; it must have"),
        ({"layer_types": ["full_attention"] * 3}, "'attn_type_list' is"),
        ({"mlp_alpha_factor": 7.0}, "'layernorm_mlp_alpha' and 'mlp_alpha_factor' disagree"),
        ({"num_attention_heads": 6}, "'num_attention_heads' is 6; only a power of two"),
        ({"shared_intermediate_size": 8}, "'shared_intermediate_size' is 8"),
    ],
)
def test_what_the_publishers_dialect_lacks_or_contradicts_is_refused(change: ConfigJson, sentence: str) -> None:
    theirs = as_remote_code(TINY, "minimax_m1", REMOTE["minimax_m1"])
    with pytest.raises((P.ConfigError, P.UnsupportedError), match=sentence):
        minimax.Config.from_hf(theirs | change)


BUFFERS = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")


@pytest.mark.parametrize("heads", [4, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stored_decays_are_those_of_the_config_or_refused(heads: int, dtype: torch.dtype) -> None:
    """transformers computes with them: as cast from fp32, and as it makes them in half precision."""
    values = TINY | {"num_attention_heads": heads, "head_dim": 2, "hidden_size": 8}
    config = minimax.Config.from_hf(values)
    attentions = []
    for made_in in (torch.float32, dtype):
        torch.set_default_dtype(made_in)
        try:
            attentions.append(MiniMaxLightningAttention(transformers.AutoConfig.for_model(**values), 1).to(dtype))
        finally:
            torch.set_default_dtype(torch.float32)
    for attention in attentions:
        for name in BUFFERS:
            stored, path = getattr(attention, name), f"model.layers.1.self_attn.{name}"
            assert minimax.as_stated(config, path, stored), name
            other = path.replace(".1.", ".0.")
            assert not minimax.as_stated(config, other, stored) and not minimax.as_stated(config, path, stored[..., :0])
            assert not minimax.as_stated(config, path, torch.full_like(stored, torch.nan))


@pytest.mark.parametrize("name", BUFFERS)
def test_a_file_with_decays_of_its_own_is_refused(name: str, tmp_path: Path) -> None:
    model = transformers.MiniMaxForCausalLM(transformers.AutoConfig.for_model(**TINY))
    model.save_pretrained(tmp_path / "usual")
    assert P.load_pretrained(tmp_path / "usual")[0] == CONFIG
    P.from_tensors(CONFIG, model.state_dict().items())
    with torch.no_grad():
        getattr(model.model.layers[1].self_attn, name).mul_(0.9)
    model.save_pretrained(tmp_path / "own")
    with pytest.raises(P.MismatchError, match=rf"hold other values, .*\n.*model\.layers\.1\.self_attn\.{name}"):
        P.load_pretrained(tmp_path / "own")
    with pytest.raises(P.MismatchError, match=f"{name}: does not hold the values that follow from the config"):
        P.from_tensors(CONFIG, model.state_dict().items())

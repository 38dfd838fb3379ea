"""MTP heads are loaded if the checkpoint has them, and left out if it has none or on request."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import params as P
from fnmodels import tree
from tests.support.cases import Case, batch_of, cases, generic_params, segments
from tests.support.mtp import mtp_cases, with_heads

FAMILIES = ("deepseek_v3", "deepseek_v3_biases", "glm4_moe")  # the second is tied
every_family = pytest.mark.parametrize("case", [case for case in cases() if case.name in FAMILIES], ids=str)
FILE = "model.safetensors"


def saved(case: Case, folder: Path) -> tuple[Any, Any]:
    config = dataclasses.replace(case.config, num_nextn_predict_layers=2)
    P.save_pretrained(folder, config, generic_params(config))
    return config, generic_params(config)


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    held = load_file(folder / FILE) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({name: t.clone() for name, t in held.items() if t is not None}, folder / FILE, metadata={"format": "pt"})


def copies_of(case: Case, config: Any) -> dict[str, str]:
    head = "model.embed_tokens.weight" if case.config.tie_word_embeddings else "lm_head.weight"
    first = config.num_hidden_layers
    return {
        f"model.layers.{i}.{name}.weight": twin
        for i in (first, first + 1)
        for name, twin in (("embed_tokens", "model.embed_tokens.weight"), ("shared_head.head", head))
    }


@every_family
def test_heads_are_kept(case: Case, tmp_path: Path) -> None:
    """Under the published names, with the copies of embedding and head that other programs look for; bit-equal back."""
    config, weights = saved(case, tmp_path)
    held = load_file(tmp_path / FILE)
    first = f"model.layers.{config.num_hidden_layers}"
    for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "input_layernorm", "mlp.experts.0.up_proj"):
        assert f"{first}.{name}.weight" in held
    assert f"{first}.mlp.gate.e_score_correction_bias" in held
    for name, twin in copies_of(case, config).items():
        assert torch.equal(held[name], held[twin])
    back, loaded = P.load_pretrained(tmp_path)
    assert back == config
    assert tree.flatten(loaded).keys() == tree.flatten(weights).keys()
    assert all(torch.equal(t, tree.flatten(weights)[path]) for path, t in tree.flatten(loaded).items())
    P.save_pretrained(tmp_path / "again", back, loaded)
    assert (tmp_path / "again" / FILE).read_bytes() == (tmp_path / FILE).read_bytes()


@every_family
@pytest.mark.parametrize("how", ["dropped", "absent"])
def test_heads_are_left_out(case: Case, how: str, tmp_path: Path) -> None:
    """On request, and if the files have none although config.json counts some (as transformers saves them)."""
    _, weights = saved(case, tmp_path)
    if how == "absent":
        first = tuple(f"model.layers.{case.config.num_hidden_layers + k}." for k in range(2))
        change(tmp_path, **dict.fromkeys(n for n in load_file(tmp_path / FILE) if n.startswith(first)))
    config, loaded = P.load_pretrained(tmp_path, drop=("mtp",) if how == "dropped" else ())
    assert config == case.config and "mtp" not in loaded
    batch = batch_of(config, segments((5, 3)))
    assert torch.equal(batch.forward(loaded), batch.forward({k: v for k, v in weights.items() if k != "mtp"}))
    P.save_pretrained(tmp_path / "again", config, loaded)
    assert P.load_pretrained(tmp_path / "again")[0] == case.config


@every_family
def test_copies_may_be_missing_but_not_different(case: Case, tmp_path: Path) -> None:
    config, weights = saved(case, tmp_path)
    names = copies_of(case, config)
    change(tmp_path, **dict.fromkeys(names))
    back, loaded = P.load_pretrained(tmp_path)
    assert back == config and tree.flatten(loaded).keys() == tree.flatten(weights).keys()
    other = sorted(names)[0]
    change(tmp_path, **{other: load_file(tmp_path / FILE)[names[other]] + 1})
    with pytest.raises(P.MismatchError, match=other.replace(".", r"\.")):
        P.load_pretrained(tmp_path)
    assert P.load_pretrained(tmp_path, drop=("mtp",))[0] == case.config


@every_family
def test_half_of_a_head_is_an_error(case: Case, tmp_path: Path) -> None:
    config, _ = saved(case, tmp_path)
    lost = f"model.layers.{config.num_hidden_layers + 1}.hnorm.weight"
    change(tmp_path, **{lost: None, "model.layers.9.hnorm.weight": torch.ones(2)})
    for drop, wrong in (((), (lost, "layers.9.hnorm")), (("mtp",), ("layers.9.hnorm",))):
        with pytest.raises(P.MismatchError) as caught:
            P.load_pretrained(tmp_path, drop=drop)
        assert all(name in str(caught.value) for name in wrong)
        assert (lost in str(caught.value)) == (lost in wrong)


# {variant: names of one head's tensors in published files}; of the others, those of DeepSeek V3.
QWEN = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
NAMES: dict[str, tuple[str, ...]] = {
    "qwen3_next": (*QWEN, "mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.experts.0.up_proj"),
    "qwen3_5": (*QWEN, "mtp.layers.0.self_attn.q_proj", "mtp.layers.0.mlp.up_proj"),
    "qwen3_5_moe": (*QWEN, "mtp.layers.0.mlp.gate"),
    "qwen3_5_wrapped": QWEN,
    "qwen3_5_moe_wrapped": QWEN,
    "hy_v3": tuple(f"LAST.{one}" for one in ("enorm", "hnorm", "eh_proj", "final_layernorm", "self_attn.q_proj")),
    "ernie4_5_moe": (
        *("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", "model.mtp_linear_proj.0"),
        *(f"model.mtp_block.0.{one}" for one in ("input_layernorm", "self_attn.q_proj", "post_attention_layernorm")),
    ),
    "longcat_flash_biases": (
        *(f"model.mtp.layers.0.{one}" for one in ("eh_proj", "enorm.m", "hnorm.m", "input_layernorm")),
        *(f"model.mtp.layers.0.{one}" for one in ("self_attn.kv_b_proj", "transformer_layer.mlp.up_proj")),
        *("model.mtp.norm", "model.mtp.embed_tokens"),
    ),
    "bailing_hybrid": (
        *(f"LAST.{one}" for one in ("enorm", "hnorm", "eh_proj", "final_layernorm", "input_layernorm")),
        *(f"LAST.{one}" for one in ("attention.kv_a_proj_with_mqa", "attention.g_proj", "attention.dense")),
        *(f"LAST.{one}" for one in ("mlp.gate", "mlp.experts.0.up_proj", "mlp.shared_experts.up_proj")),
    ),
    "minimax_m3": (
        *(f"model.mtp.layers.0.{one}" for one in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
        *(f"model.mtp.layers.0.transformer_layer.{one}" for one in ("input_layernorm", "self_attn.q_proj")),
    ),
    "minimax_m3_wrapped": (
        *(f"language_model.model.mtp.layers.0.{one}" for one in ("enorm", "hnorm", "eh_proj", "final_layernorm")),
        "language_model.model.mtp.layers.0.transformer_layer.self_attn.index_q_proj",
        "language_model.model.mtp.layers.0.transformer_layer.block_sparse_moe.experts.0.w1",
    ),
    "mellum": (*QWEN, "mtp.layers.0.self_attn.q_norm", "mtp.layers.0.mlp.experts.0.up_proj"),
    "exaone_moe": (*QWEN, "mtp.layers.0.self_attn.q_norm", "mtp.layers.0.mlp.up_proj"),
    "mimo_v2_flash": (
        *(f"model.mtp.layers.0.{one}" for one in ("enorm", "hnorm", "eh_proj", "input_layernorm", "self_attn.q_proj")),
        *(f"model.mtp.layers.0.{one}" for one in ("pre_mlp_layernorm", "mlp.down_proj", "final_layernorm")),
        "model.mtp.layers.0.self_attn.attention_sink_bias",
    ),
    "step3p5": (
        *(f"LAST.{one}" for one in ("enorm", "hnorm", "eh_proj", "input_layernorm", "self_attn.g_proj", "mlp.up_proj")),
        *(f"LAST.transformer.shared_head.{one}" for one in ("norm", "output")),
    ),
    "nemotron_h_moe": (
        *(f"mtp.layers.0.{one}" for one in ("enorm", "hnorm", "eh_proj", "norm", "mixer.q_proj", "mixer.o_proj")),
        *(f"mtp.layers.1.{one}" for one in ("norm", "mixer.gate", "mixer.experts.0.up_proj", "final_layernorm")),
        "mtp.layers.1.mixer.shared_experts.down_proj",
    ),
}
NAMES |= dict.fromkeys(("exaone4", "exaone4_listed"), (*QWEN, "mtp.layers.0.post_feedforward_layernorm"))
NAMES["deepseek_v4"] = (
    *(f"mtp.0.{one}" for one in ("enorm", "hnorm", "e_proj", "h_proj", "norm", "attn_norm", "ffn_norm", "attn.wq_a")),
    *(f"mtp.0.hc_{part}_{leaf}" for part in ("head", "attn", "ffn") for leaf in ("fn", "base", "scale")),
    *(f"mtp.0.{one}" for one in ("attn.attn_sink", "attn.wo_b", "ffn.gate", "ffn.gate.bias", "ffn.experts.0.w1")),
    "mtp.0.ffn.shared_experts.w3",
)
QWEN4 = (
    *(f"mtp.{one}" for one in ("fc_embedding", "fc_hidden", "pre_fc_norm_embedding", "pre_fc_norm_hidden")),
    *(f"mtp.hyper_connection_mixer.{one}" for one in ("hc_norm", "input_mix_weight_down", "input_mix_weight_up")),
    *(f"mtp.layers.0.{part}_hyper_connection.block_inject_weight" for part in ("attn", "mlp")),
    *(f"mtp.layers.0.{one}" for one in ("self_attn.q_proj", "self_attn.indexer.index_qk_proj", "mlp.gate")),
    *(f"mtp.layers.0.mlp.{one}" for one in ("experts.0.up_proj", "shared_expert.up_proj", "shared_expert_gate")),
)
NAMES |= dict.fromkeys(("qwen4_exp", "qwen4_exp_ngrams", "qwen4_exp_wrapped"), QWEN4)
LING = (
    *(f"LAST.{one}" for one in ("enorm", "hnorm", "eh_proj", "final_layernorm", "attention.query_key_value")),
    *(f"LAST.{one}" for one in ("attention.dense", "mlp.experts.0.up_proj", "mlp.gate")),
)
NAMES |= dict.fromkeys(("bailing_moe", "bailing_moe_v2"), LING)
HY4 = ("enorm", "hnorm", "eh_proj", "final_layernorm", "self_attn.indexer.wk", "self_attn.linear_gate", "mlp.gate")
NAMES |= dict.fromkeys(("hy_v4", "hy_v4_vl_text"), tuple(f"model.mtp_layers.0.{one}" for one in HY4))
GLM5 = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.indexer.wk", "mlp.gate", "mlp.experts.0.up_proj")
NAMES["glm5_next_wrapped"] = tuple(f"model.language_model.layers.3.{one}" for one in GLM5)
USUAL = tuple(f"LAST.{one}" for one in ("enorm", "hnorm", "eh_proj", "shared_head.norm", "input_layernorm"))


@pytest.mark.parametrize("case", mtp_cases(), ids=str)
def test_heads_stand_under_the_published_names(case: Case, tmp_path: Path) -> None:
    """Saved, read bit-equal, left out on request and where files have none; a part of a head is an error."""
    config = with_heads(case.config, 1)
    weights = generic_params(config)
    P.save_pretrained(tmp_path, config, weights)
    held, last = load_file(tmp_path / FILE), f"model.layers.{config.num_hidden_layers}"
    names = [name.replace("LAST", last) for name in NAMES.get(case.name, USUAL)]
    assert {name.removesuffix(".weight") for name in held} >= set(names)
    back, loaded = P.load_pretrained(tmp_path)
    assert back == config and tree.flatten(loaded).keys() == tree.flatten(weights).keys()
    assert all(torch.equal(t, tree.flatten(weights)[path]) for path, t in tree.flatten(loaded).items())
    without, loaded = P.load_pretrained(tmp_path, drop=("mtp",))
    assert without == case.config and "mtp" not in loaded

    P.save_pretrained(tmp_path / "none", case.config, {name: leaf for name, leaf in weights.items() if name != "mtp"})
    assert load_file(tmp_path / "none" / FILE).keys() < held.keys()
    (tmp_path / "none" / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    without, loaded = P.load_pretrained(tmp_path / "none")
    assert without == case.config and "mtp" not in loaded
    change(tmp_path, **{f"{names[0]}.weight": None})
    with pytest.raises(P.MismatchError, match=re.escape(names[0])):
        P.load_pretrained(tmp_path)


def test_what_cannot_be_dropped_is_said(tmp_path: Path) -> None:
    case = next(case for case in cases() if case.name == "deepseek_v3")
    saved(case, tmp_path / "one")
    with pytest.raises(ValueError, match="drop names 'norm'; what can be left out of this model is 'mtp'"):
        P.load_pretrained(tmp_path / "one", drop=("norm",))
    llama = next(case for case in cases() if case.family == "llama")
    P.save_pretrained(tmp_path / "two", llama.config, generic_params(llama.config))
    with pytest.raises(ValueError, match="left out of this model is nothing"):
        P.load_pretrained(tmp_path / "two", drop=("mtp",))

"""Step 3.5: the published form of its config.json, what is refused, and files with MTP layers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import params as P
from fnmodels import tree
from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.decoder import step3p5
from tests.support.cases import generic_params
from tests.variants.step3p5 import TINY

CONFIG = step3p5.Config.from_hf(TINY)
_HEADS = {"attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 8}
# TINY as the publisher writes it, with an entry for an MTP layer at the end of each list.
PUBLISHED: dict[str, Any] = {
    name: value
    for name, value in TINY.items()
    if name not in ("num_key_value_heads", "num_sliding_attention_heads", "mlp_layer_types", "rope_parameters")
} | {
    "num_nextn_predict_layers": 1,
    "num_attention_groups": 2,
    "attention_other_setting": _HEADS,
    "moe_layers_enum": "1,2",
    "layer_types": [*TINY["layer_types"], "sliding_attention"],
    "swiglu_limits": [*TINY["swiglu_limits"], 0.0],
    "swiglu_limits_shared": [*TINY["swiglu_limits_shared"], 0.0],
    "rope_theta": [40.0, 20.0, 40.0, 20.0],
    "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
    "rope_scaling": {
        name: value
        for name, value in TINY["rope_parameters"]["full_attention"].items()
        if name not in ("rope_theta", "partial_rotary_factor")
    },
    "yarn_only_types": ["full_attention"],
}


def test_the_published_form_is_the_same_model() -> None:
    wanted = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)
    assert step3p5.Config.from_hf(PUBLISHED) == wanted
    assert step3p5.Config.from_hf(PUBLISHED | {"moe_layers_enum": [1, 2]}) == wanted


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"attention_other_setting": _HEADS | {"num_attention_groups": 3}}, UnsupportedError, "attention_groups' is 3"),
        ({"attention_other_setting": _HEADS | {"num_attention_heads": 5}}, ConfigError, "5 is not a multiple of"),
        (
            {"per_layer_config": {"1": {"num_attention_heads": 8}}},
            UnsupportedError,
            "'num_attention_heads' is 8; only 6",
        ),
        ({"per_layer_config": {"a": {}}}, ConfigError, r"an object for each of the layers \[1\]"),
        ({"layer_types": 5}, ConfigError, "'layer_types' must name 3 layers"),
        ({"rope_theta": [40.0, 20.0, 50.0, 20.0]}, UnsupportedError, "'rope_theta' is .* one for all full layers"),
        ({"swiglu_limits": [0.0, 1.0]}, ConfigError, "'swiglu_limits' is .* must list 3 numbers or null"),
        ({"swiglu_limits": [0.0, "a", 0.0]}, ConfigError, "must list 3 numbers or null"),
        ({"swiglu_limits_shared": [0.0, -1.0, 0.0]}, ConfigError, "two numbers of at least 0"),
        ({"moe_layers_enum": "1-2"}, ConfigError, "must be a list of at most 3 numbers of layers"),
        ({"moe_layers_enum": "1,2,3"}, ConfigError, "must be a list of at most 3 numbers of layers"),
        ({"layer_types": [*TINY["layer_types"], "full_attention"]}, UnsupportedError, "for an MTP layer"),
        ({"swiglu_limits_shared": [0.0, 0.0, 0.0, 9.0]}, UnsupportedError, "has 9.0 for an MTP layer"),
        ({"rope_theta": [40.0, 20.0, 40.0, 21.0]}, UnsupportedError, "has 21.0 for an MTP layer"),
        ({"mtp_mlp_layer_types": ["sparse"]}, UnsupportedError, "'mtp_mlp_layer_types' has \"sparse\" for an MTP"),
        ({"yarn_only_types": ["sliding_attention"]}, UnsupportedError, "'yarn_only_types' is"),
        ({"rope_parameters": {"factor": 2.0}}, UnsupportedError, "must have an object for each of full_attention"),
        ({"zero_centered": False}, UnsupportedError, "'zero_centered' is false"),
    ],
)
def test_a_model_of_another_form_is_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        step3p5.Config.from_hf(PUBLISHED | changes)


def test_limits_are_in_the_order_of_their_layers() -> None:
    limits = ((9.0, 1.0), (7.0, 0.0), (0.0, 16.0))
    kinds = ("sliding_moe_2", "full", "full_moe_1")
    config = dataclasses.replace(CONFIG, limits=limits, layer_kinds=kinds)
    assert config.limits == ((0.0, 16.0), (7.0, 0.0)) and config.layer_kinds == ("sliding_moe_0", "full", "full_moe_1")
    assert step3p5.Config.from_hf(config.to_hf()) == config
    with pytest.raises(ConfigError, match="name more limits than the 1 in limits"):
        dataclasses.replace(CONFIG, limits=limits[:1])


# vLLM's step3p5_mtp.py reads these names.
HEAD = {"enorm", "hnorm", "eh_proj", "transformer.shared_head.norm", "transformer.shared_head.output"}
HEAD |= {"input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
HEAD |= {f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj", "q_norm", "k_norm")}


def test_heads_have_the_published_names(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=2)
    wanted = generic_params(config)
    P.save_pretrained(tmp_path, config, wanted)
    tensors = load_file(tmp_path / "model.safetensors")
    for head in (3, 4):
        found = {name.removeprefix(f"model.layers.{head}.") for name in tensors if f".layers.{head}." in name}
        assert {name for name in found if not name.endswith(".bias")} == {f"{name}.weight" for name in HEAD}
        at = f"model.layers.{head}."
        assert tensors[f"{at}transformer.shared_head.output.weight"].shape == (config.vocab_size, config.hidden_size)
        assert tensors[f"{at}self_attn.q_proj.weight"].shape == (6 * config.head_dim, config.hidden_size)
    again, params = P.load_pretrained(tmp_path, copy=True)
    assert again == config
    leaves = tree.flatten(wanted)
    assert all(torch.equal(leaf, leaves[path]) for path, leaf in tree.flatten(params).items())
    assert not torch.equal(params["mtp"][0]["lm_head"], params["mtp"][1]["lm_head"])


def test_mtp_layers_that_the_config_does_not_count_are_left_out(tmp_path: Path) -> None:
    wanted = generic_params(CONFIG)
    P.save_pretrained(tmp_path, CONFIG, wanted)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, file, metadata={"format": "pt"})
    config, params = P.load_pretrained(tmp_path, copy=True)
    assert config == CONFIG
    leaves = tree.flatten(wanted)
    assert all(torch.equal(leaf, leaves[path]) for path, leaf in tree.flatten(params).items())
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(P.MismatchError, match=r"model\.layers\.2\.eh_proj"):
        P.load_pretrained(tmp_path)

"""config.json files as they are published, every field: each is read, and is its preset.

`published.json` in tests/support has them by the names of presets. Fields that a publisher's own code has left
behind are what a family written from transformers alone refuses.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import fnmodels
import params as P

FILES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parents[2] / "support" / "published.json").read_text())
# Published only within a wrapper's text_config (llama4's is in tests/variants/llama4.py), or under another type.
WITHOUT = {"llama4", "llama4_text", "ministral", "ministral3"}
# Whose files stand in tests/variants.
WITHOUT |= {"deepseek_v2", "deepseek_v3", "glm4_moe", "kimi_k2"}


def test_every_model_type_has_a_published_file() -> None:
    assert {values["model_type"] for values in FILES.values()} == fnmodels.families().keys() - WITHOUT


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_is_read_and_is_its_preset(name: str, tmp_path: Path) -> None:
    """Standard deviations of a fresh model aside, which presets leave at the family's."""
    (tmp_path / "config.json").write_text(json.dumps(FILES[name]))
    config, preset = P.load_config(tmp_path), fnmodels.preset(name)
    assert config == dataclasses.replace(preset, initializer_range=config.initializer_range)
    assert config.to_hf()["architectures"] == [FILES[name]["architectures"][0].replace("TextModel", "ForCausalLM")]


def test_what_qwen3_coder_says_besides(tmp_path: Path) -> None:
    """Its files name what every qwen3_moe is."""
    plain = FILES["qwen3-30b-a3b"]
    coder = plain | {"intermediate_size": 5472, "max_position_embeddings": 262144, "max_window_layers": 28}
    coder |= {"rope_theta": 10000000, "router_aux_loss_coef": 0.0, "shared_expert_intermediate_size": 0}
    coder |= {"qkv_bias": False, "use_qk_norm": True}
    (tmp_path / "config.json").write_text(json.dumps(coder))
    config, preset = P.load_config(tmp_path), fnmodels.preset("qwen3-30b-a3b")
    rope = dataclasses.replace(preset.rope, theta=1e7)
    changes = {"intermediate_size": 5472, "max_position_embeddings": 262144, "rope": rope}
    assert config == dataclasses.replace(preset, **changes)


@pytest.mark.parametrize("name", ["granite-3.1-2b", "gpt2", "starcoder2-3b"])
def test_dropout_is_kept_for_those_who_train_elsewhere(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FILES[name]))
    given = {field: value for field, value in FILES[name].items() if "dropout" in field or field.endswith("pdrop")}
    given.pop("summary_first_dropout", None)  # of a head that is not there
    written = P.load_config(tmp_path).to_hf()
    assert given and {field: written[field] for field in given} == given


@pytest.mark.parametrize(
    ("name", "changes", "error"),
    [
        ("gemma-2-9b", {"hidden_act": "gelu"}, "'hidden_act' is \"gelu\""),
        ("gemma-2-9b", {"sliding_window_size": 512}, "'sliding_window_size' is 512; only 4096"),
        ("starcoder2-3b", {"layer_norm_epsilon": 1e-3}, "'layer_norm_epsilon' is 0.001; only 1e-05"),
        ("starcoder2-3b", {"activation_function": "relu"}, "'activation_function'"),
        ("starcoder2-3b", {"scale_attn_weights": False}, "'scale_attn_weights' is false"),
        ("starcoder2-3b", {"attention_softmax_in_fp32": False}, "'attention_softmax_in_fp32' is false"),
        ("command-r7b", {"layer_switch": 2}, "'layer_switch' is 2; only 4"),
        ("command-r7b", {"order_of_interleaved_layers": "global_attn_first"}, "'order_of_interleaved_layers'"),
        ("command-r7b", {"position_embedding_type": "rope_neox"}, "'position_embedding_type'"),
        ("command-r7b", {"rotary_pct": 0.5}, "'rotary_pct' is 0.5; only 1.0"),
        ("command-r7b", {"use_embedding_sharing": False}, "'use_embedding_sharing' is false"),
        ("command-r7b", {"use_gated_activation": False}, "'use_gated_activation' is false"),
        ("qwen3-30b-a3b", {"qkv_bias": True}, "'qkv_bias' is true; only false"),
        ("qwen3-30b-a3b", {"use_qk_norm": False}, "'use_qk_norm' is false; only true"),
        ("qwen3-30b-a3b", {"shared_expert_intermediate_size": 64}, "'shared_expert_intermediate_size' is 64; only 0"),
    ],
)
def test_second_names_that_say_something_else_are_refused(
    name: str, changes: dict[str, Any], error: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(FILES[name] | changes))
    with pytest.raises(P.UnsupportedError, match=error):
        P.load_config(tmp_path)

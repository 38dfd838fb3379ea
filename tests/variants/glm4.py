"""Tiny configurations of the GLM-4 (0414) family, one per variation of its maths; its published sizes."""

import json
from typing import Any

TINY: dict[str, Any] = {
    "model_type": "glm4",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "attention_bias": True,
    "tie_word_embeddings": False,
    # the defaults are outside of this vocabulary
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _glm4(rope: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0} | rope, **changes}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5}
    return {
        "glm4": _glm4({}),  # by default half of each head rotates
        "glm": _glm4({}) | {"model_type": "glm"},
        "glm4_no_bias": _glm4({"partial_rotary_factor": 0.5}, attention_bias=False, num_key_value_heads=4),
        "glm4_whole": _glm4({"partial_rotary_factor": 1.0}, hidden_act="gelu_pytorch_tanh"),
        "glm4_yarn_tied": _glm4(
            yarn | {"partial_rotary_factor": 0.7, "original_max_position_embeddings": 16}, tie_word_embeddings=True
        ),
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models, in the published dialect."""
    return {
        "glm_4_32b": {
            "architectures": ["Glm4ForCausalLM"],
            "model_type": "glm4",
            "vocab_size": 151552,
            "hidden_size": 6144,
            "intermediate_size": 23040,
            "num_hidden_layers": 61,
            "num_attention_heads": 48,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published model: number of parameters}; published as 32.57B, counted by hand."""
    return {"glm_4_32b": 32_566_081_536}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "glm-4-9b": 9_400_279_040,
    "glm-4-9b-chat": 9_399_951_360,
    "glm-4-32b": "32B",
}

# The complete published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "glm-4-9b": {
    "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "attention_bias": true, "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "initializer_range": 0.02, "intermediate_size": 13696, "max_position_embeddings": 32768, "num_attention_heads":
    32, "num_hidden_layers": 40, "num_key_value_heads": 2, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.52.0.dev0", "use_cache": true, "vocab_size": 151552
  }
}""")

# Fields refused at any changed value: alone they contradict other fields, or no published model has them.
REFUSED = {
    **{key: {"rope_parameters..partial_rotary_factor"} for key in ("glm", "glm4")},
}

NO_FILE = {"glm": "no copy is at hand; one that transformers writes is read in test_release_configs.py"}

"""Tiny configurations of the Phi-3 family, one per variation of its maths, and its published sizes.

24 tokens exceed an original context of 16, but not one of 32.
"""

import json
from typing import Any

TINY: dict[str, Any] = {
    "model_type": "phi3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": False,
    # the defaults are outside of this vocabulary
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _phi3(original: int = 64, **changes: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4}
    return {**TINY, "rope_parameters": rope, "original_max_position_embeddings": original, **changes}


def _long(original: int, partial: float = 1.0, **changes: Any) -> dict[str, Any]:
    pairs = int(8 * partial) // 2
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": partial}
    rope |= {"short_factor": [1.0, 1.1, 1.3, 1.7][:pairs], "long_factor": [1.2, 2.0, 3.5, 5.0][:pairs]}
    return _phi3(original, rope_parameters=rope | changes.pop("rope", {}), **changes)


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    rope = {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.6}
    return {
        "phi3": _phi3(),
        "phi3_head_dim": _phi3(head_dim=10, rope_parameters=rope, hidden_act="gelu_pytorch_tanh"),
        "phi3_sliding": _phi3(sliding_window=5, num_key_value_heads=4),
        "phi3_longrope_short": _long(32),
        "phi3_longrope_long": _long(16, sliding_window=9),
        "phi3_longrope_partial": _long(16, 0.75, tie_word_embeddings=True),
        "phi3_longrope_factor": _long(16, rope={"factor": 7.0}),
        "phi3_longrope_attention_factor": _long(16, rope={"attention_factor": 1.3}),
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models, in the published dialect (the long factors made up)."""
    mini_rope = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + i for i in range(48)]}
    return {
        "phi_4": {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "vocab_size": 100352,
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5,
            "rope_theta": 250000,
            "rope_scaling": None,
            "sliding_window": None,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        },
        "phi_4_mini": {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "vocab_size": 200064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": mini_rope,
            "partial_rotary_factor": 0.75,
            "sliding_window": 262144,
            "attention_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published model: number of parameters}; published as 14.7B and 3.8B, counted by hand."""
    return {"phi_4": 14_659_507_200, "phi_4_mini": 3_836_021_760}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "phi-3-mini": 3_821_079_552,
    "phi-3-medium": 13_960_238_080,
    "phi-4": 14_659_507_200,
    "phi-4-mini": 3_836_021_760,
}

# The complete published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "phi-3-mini": {
    "_name_or_path": "Phi-3-mini-4k-instruct", "architectures": ["Phi3ForCausalLM"], "model_type": "phi3",
    "attention_bias": false, "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config",
    "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}, "bos_token_id": 1, "embd_pdrop": 0.0, "eos_token_id":
    32000, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02, "intermediate_size": 8192,
    "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
    "rope_scaling": null, "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": true, "vocab_size": 32064
  },
  "phi-4": {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "attention_bias": false, "attention_dropout": 0.0,
    "bos_token_id": 100257, "embd_pdrop": 0.0, "eos_token_id": 100265, "hidden_act": "silu", "hidden_size": 5120,
    "initializer_range": 0.02, "intermediate_size": 17920, "max_position_embeddings": 16384, "num_attention_heads":
    40, "num_hidden_layers": 40, "num_key_value_heads": 10, "original_max_position_embeddings": 16384,
    "pad_token_id": 100349, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 250000,
    "sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version":
    "4.47.0", "use_cache": true, "vocab_size": 100352
  }
}""")

# Fields refused at any changed value: alone they contradict other fields, or no published model has them.
REFUSED = {
    "phi3": {"hidden_size"},
}

"""Tiny configurations of the OLMo family, one per variation of its maths, and its published sizes."""

import json
from typing import Any

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "tie_word_embeddings": False,
}

# In the published dialect: the layer type of `rope_theta` and `rope_scaling`, and the fields of the other thetas.
OLDER_ROPES = ("full_attention", {})

# A model with one kind of layer reads one rotary table.
BLIND = {name: {"local_rope.theta", "local_rope.partial"} for name in ("olmo2", "olmo2_bias_tied")}


def _third(**changes: Any) -> dict[str, Any]:
    yarn = {"factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5, "original_max_position_embeddings": 16}
    ropes = {
        "full_attention": {"rope_type": "yarn", "rope_theta": 100.0, **yarn, "attention_factor": 1.2},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    }
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    values = TINY | {"model_type": "olmo3", "rms_norm_eps": 1e-2, "rope_parameters": ropes, "num_hidden_layers": 3}
    return values | {"layer_types": types, "sliding_window": 6} | changes


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    second = TINY | {"model_type": "olmo2", "rms_norm_eps": 1e-2}
    return {
        "olmo2": second,
        "olmo2_bias_tied": second | {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 4},
        "olmo3": _third(),
        "olmo3_bias": _third(attention_bias=True),
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models, in the published dialect."""
    return {
        "olmo2_32b": {
            "architectures": ["Olmo2ForCausalLM"],
            "model_type": "olmo2",
            "vocab_size": 100352,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its published number of parameters}."""
    return {"olmo2_32b": 32_234_279_936}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
}

# The complete published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "olmo-2-7b": {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "attention_bias": false, "attention_dropout": 0.0,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta":
    500000, "tie_word_embeddings": false, "torch_dtype": "float32", "transformers_version": "4.47.0.dev0",
    "use_cache": true, "vocab_size": 100352
  },
  "olmo-3-7b": {
    "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "attention_bias": false, "attention_dropout": 0.0,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
    "intermediate_size": 11008, "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
    "full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
    "sliding_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention",
    "sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
    "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
    "full_attention", "sliding_attention", "sliding_attention", "sliding_attention", "full_attention",
    "sliding_attention", "sliding_attention", "sliding_attention", "full_attention"], "max_position_embeddings":
    65536, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
    "rms_norm_eps": 1e-06, "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow":
    1.0, "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "rope_theta": 500000,
    "sliding_window": 4096, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version":
    "4.57.0", "use_cache": false, "vocab_size": 100278
  }
}""")

"""Tiny configurations of StableLM, one per variation of its maths, and its published sizes."""

import json
from typing import Any

TINY: dict[str, Any] = {
    "model_type": "stablelm",
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e2, "partial_rotary_factor": 0.25},
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    linear = {"rope_type": "linear", "rope_theta": 1e3, "partial_rotary_factor": 0.5, "factor": 3.0}
    return {
        "stablelm": TINY,
        "stablelm_bias_tied": TINY
        | {"use_qkv_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu", "rope_parameters": linear},
        "stablelm_parallel_norms": TINY | {"use_parallel_residual": True, "qk_layernorm": True},
        "stablelm_norms": TINY | {"qk_layernorm": True, "use_qkv_bias": True, "num_key_value_heads": 4},
        "stablelm_parallel": TINY | {"use_parallel_residual": True, "num_key_value_heads": 1},
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, in the published dialect."""
    return {
        "stablelm_2_12b": {
            "architectures": ["StableLmForCausalLM"],
            "model_type": "stablelm",
            "vocab_size": 100352,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 4096,
            "layer_norm_eps": 1e-5,
            "rope_theta": 10000,
            "partial_rotary_factor": 0.25,
            "use_qkv_bias": False,
            "qk_layernorm": True,
            "use_parallel_residual": True,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "tie_word_embeddings": False,
            "bos_token_id": 100257,
            "eos_token_id": 100257,
        },
    }


def sizes() -> dict[str, int]:
    """{name: number of parameters}, from the shapes; the model card says 12,143,605,760, see TOTALS."""
    return {"stablelm_2_12b": 12_143_185_920}


# The model card of StableLM 2 12B says 12,143,605,760. Its shapes sum to that minus the weights and biases of the 41
# LayerNorms over the model's width, which the card counts twice.
# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "stablelm-3b-4e1t": 2_795_443_200,
    "stablelm-2-1.6b": 1_644_515_328,
    "stablelm-2-12b": 12_143_605_760 - 41 * 2 * 5120,
}

# The complete published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "stablelm-2-1.6b": {
    "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "bos_token_id": 100257, "eos_token_id":
    100257, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5632,
    "layer_norm_eps": 1e-05, "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 24,
    "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "rope_theta": 10000, "tie_word_embeddings": false,
    "torch_dtype": "float16", "transformers_version": "4.38.0", "use_cache": true, "use_qkv_bias": true,
    "vocab_size": 100352
  }
}""")

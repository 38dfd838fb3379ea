"""Tiny configurations of StableLM, one per way in which its maths can differ, and its published sizes."""

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
    """{name: config.json} of the largest published member, in the published dialect."""
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
    """{name: how many parameters}, by shapes; the card says 12,143,605,760, see test_presets.py."""
    return {"stablelm_2_12b": 12_143_185_920}

"""Tiny configurations of the Granite family, one per way in which its maths can differ, and its published sizes."""

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


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    values = TINY | {"model_type": "granite", "rms_norm_eps": 1e-2}
    constants = {"embedding_multiplier": 1.7, "residual_multiplier": 0.6, "attention_multiplier": 0.3}
    return {
        "granite": values | constants | {"logits_scaling": 0.7},
        "granite_bias_tied": values
        | constants
        | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "logits_scaling": 1.5},
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published members, in the published dialect."""
    return {
        "granite_3_1_8b": {
            "architectures": ["GraniteForCausalLM"],
            "model_type": "granite",
            "vocab_size": 49155,
            "hidden_size": 4096,
            "intermediate_size": 12800,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000000.0,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.0078125,
            "logits_scaling": 16.0,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has, as published}."""
    return {"granite_3_1_8b": 8_170_848_256}

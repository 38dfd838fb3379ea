"""Tiny configuration of Granite with windows, and the size of the defaults of transformers."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "granite_swa",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.7,
    "attention_bias": True,
    "mlp_bias": True,
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention"],
    "layer_rope_theta": [50.0, 20.0],
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"granite_swa": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the defaults of transformers."""
    sizes = {"vocab_size": 100352, "hidden_size": 2560, "intermediate_size": 8192, "num_hidden_layers": 24}
    return {"granite_swa": {"model_type": "granite_swa", "num_attention_heads": 20} | sizes}


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes."""
    D = 2560
    layer = 2 * D * D + 2 * D * 512 + 20 + 3 * D * 8192 + 2 * D
    return {"granite_swa": 100352 * D + D + 24 * layer}


REFUSED = {"granite_swa": {"layer_types", "layer_rope_theta", "num_hidden_layers"}}  # a theta for each type of layers

"""Tiny configurations of Jais 2 and its published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "jais2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"jais2": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model."""
    own = {"architectures": ["Jais2ForCausalLM"], "vocab_size": 150272, "hidden_size": 3328, "num_hidden_layers": 32}
    own |= {"intermediate_size": 26624, "num_attention_heads": 26, "num_key_value_heads": 26, "hidden_act": "relu2"}
    own |= {"attention_bias": True, "mlp_bias": True, "layer_norm_eps": 1e-5, "max_position_embeddings": 8192}
    return {"jais_2_8b": {"model_type": "jais2"} | own | {"rope_theta": 10000.0, "tie_word_embeddings": False}}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"jais_2_8b": 8_090_401_280}


# Parameter counts of the presets.
TOTALS: dict[str, int | str] = {"jais-2-8b": 8_090_401_280}

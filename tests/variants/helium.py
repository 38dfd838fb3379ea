"""Tiny configurations of Helium and its published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "helium",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "mlp_bias": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "pad_token_id": 0,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"helium": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model."""
    own = {"architectures": ["HeliumForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1}
    own |= {"eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02}
    own |= {"intermediate_size": 8192, "max_position_embeddings": 4096, "mlp_bias": False, "num_attention_heads": 16}
    own |= {"num_hidden_layers": 28, "num_key_value_heads": 8, "pad_token_id": 3, "rms_norm_eps": 1e-8}
    own |= {"rope_theta": 20000.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 64000}
    return {"helium_1_2b": {"model_type": "helium"} | own}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"helium_1_2b": 2_023_868_416}


# Parameter counts of the presets.
TOTALS: dict[str, int | str] = {"helium-1-2b": 2_023_868_416}

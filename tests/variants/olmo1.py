"""Tiny configurations of OLMo 1 and its published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "olmo",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "pad_token_id": 0,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"olmo": TINY, "olmo_clipped": TINY | {"clip_qkv": 0.5, "attention_bias": True, "tie_word_embeddings": True}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, in the published dialect."""
    own = {"architectures": ["OlmoForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None}
    own |= {"eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02}
    own |= {"intermediate_size": 11008, "max_position_embeddings": 2048, "num_attention_heads": 32, "pad_token_id": 1}
    own |= {"num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rope_scaling": None}
    own |= {"rope_theta": 10000.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 50304}
    return {"olmo_7b": {"model_type": "olmo"} | own}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"olmo_7b": 6_888_095_744}


# Parameter counts of the presets.
TOTALS: dict[str, int | str] = {"olmo-1b": 1_176_764_416, "olmo-7b": 6_888_095_744}

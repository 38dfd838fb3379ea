"""Tiny configurations of Persimmon and its published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "persimmon",
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e2, "partial_rotary_factor": 0.5},
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"persimmon": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, in the published dialect."""
    own = {"architectures": ["PersimmonForCausalLM"], "vocab_size": 262144, "hidden_size": 4096, "bos_token_id": 71013}
    own |= {"eos_token_id": 71013, "hidden_act": "relu2", "intermediate_size": 16384, "layer_norm_eps": 1e-5}
    own |= {"max_position_embeddings": 16384, "num_attention_heads": 64, "num_hidden_layers": 36, "use_cache": True}
    own |= {"num_key_value_heads": 64, "partial_rotary_factor": 0.5, "qk_layernorm": True, "rope_scaling": None}
    return {"persimmon_8b": {"model_type": "persimmon"} | own | {"rope_theta": 25000.0, "tie_word_embeddings": False}}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"persimmon_8b": 9_397_175_296}


# Parameter counts of the presets.
TOTALS: dict[str, int | str] = {"persimmon-8b": 9_397_175_296}

"""Tiny configurations of nanochat and its published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "nanochat",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "final_logit_softcapping": 2.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"nanochat": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model."""
    own = {"architectures": ["NanoChatForCausalLM"], "vocab_size": 65536, "hidden_size": 2048, "num_hidden_layers": 32}
    own |= {"intermediate_size": 8192, "num_attention_heads": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-6}
    own |= {"max_position_embeddings": 2048, "hidden_act": "relu2", "final_logit_softcapping": 15.0, "use_cache": True}
    return {"nanochat_d32": {"model_type": "nanochat"} | own | {"rope_theta": 10000.0, "tie_word_embeddings": False}}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"nanochat_d32": 1_879_048_192}


# Parameter counts of the presets.
TOTALS: dict[str, int | str] = {"nanochat-d20": 560_988_160, "nanochat-d32": 1_879_048_192}

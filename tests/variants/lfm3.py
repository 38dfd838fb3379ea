"""Tiny configurations of LFM3 and its published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "lfm3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "norm_eps": 1e-2,
    "conv_L_cache": 3,
    "sliding_window": 5,
    "layer_types": ["conv", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e2, "partial_rotary_factor": 0.5},
    },
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What transformers 5.24 gets wrong.
SEPARATE = {
    "packed": "the convolution runs on from one document into the next",
    "left": "a bias of the projection before the convolution is seen in padding",
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    plain = {"use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True, "attention_bias": True}
    return {"lfm3": TINY, "lfm3_plain": TINY | plain | {"tie_word_embeddings": False}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model."""
    own = {"architectures": ["Lfm3ForCausalLM"], "vocab_size": 128000, "hidden_size": 2048, "intermediate_size": 7680}
    own |= {"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128}
    own |= {"conv_L_cache": 7, "conv_bias": False, "sliding_window": 256, "norm_eps": 1e-5, "use_sandwich_norm": True}
    own |= {"use_attention_gate": True, "tie_word_embeddings": True, "max_position_embeddings": 128000}
    return {"lfm3_1_7b": {"model_type": "lfm3"} | own}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"lfm3_1_7b": 1_728_801_536}


# Parameter counts of the presets.
TOTALS: dict[str, int | str] = {"lfm3-1.7b": 1_728_801_536}

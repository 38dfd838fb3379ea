"""Tiny configurations of the Cohere family, one per way in which its maths can differ, and its published sizes."""

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
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    values = TINY | {"model_type": "cohere2", "layer_norm_eps": 1e-2, "num_hidden_layers": 3, "layer_types": types}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # the default ones lie outside of this vocabulary
    values |= {"sliding_window": 6, "logit_scale": 0.8, "tie_word_embeddings": True, **ids}
    return {"cohere2": values, "cohere2_bias_untied": values | {"attention_bias": True, "tie_word_embeddings": False}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published members, in the published dialect."""
    return {
        "command_a": {
            "architectures": ["Cohere2ForCausalLM"],
            "model_type": "cohere2",
            "vocab_size": 256000,
            "hidden_size": 12288,
            "intermediate_size": 36864,
            "num_hidden_layers": 64,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 131072,
            "layer_norm_eps": 1e-5,
            "rope_theta": 50000,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "logit_scale": 0.25,
            "tie_word_embeddings": True,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has, as published}."""
    return {"command_a": 111_057_580_032}

"""Tiny configurations of StarCoder 2, one per way in which its maths can differ, and its published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "starcoder2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "norm_epsilon": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
    return {
        "starcoder2": TINY | {"sliding_window": 6},
        "starcoder2_full_untied": TINY | {"tie_word_embeddings": False, "hidden_act": "relu"},
        "starcoder2_no_bias": TINY | {"use_bias": False, "head_dim": 10, "rope_parameters": linear},
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member, in the published dialect."""
    return {
        "starcoder2_15b": {
            "architectures": ["Starcoder2ForCausalLM"],
            "model_type": "starcoder2",
            "vocab_size": 49152,
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "num_hidden_layers": 40,
            "num_attention_heads": 48,
            "num_key_value_heads": 4,
            "max_position_embeddings": 16384,
            "norm_epsilon": 1e-5,
            "rope_theta": 100000,
            "sliding_window": 4096,
            "use_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "attention_dropout": 0.1,
            "residual_dropout": 0.1,
            "embedding_dropout": 0.1,
            "initializer_range": 0.01275,
            "tie_word_embeddings": False,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has, as published}."""
    return {"starcoder2_15b": 15_957_889_024}

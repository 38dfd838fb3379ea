"""Tiny configurations of the Ministral 3 family, one per variation of its maths, and its published sizes."""

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
    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 0.25, "beta_slow": 0.05}
    yarn |= {"original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 0.7}
    values = TINY | {"model_type": "ministral3", "rms_norm_eps": 1e-2, "head_dim": 10, "rope_parameters": yarn}
    return {"ministral3": values, "ministral3_sliding": values | {"sliding_window": 6, "tie_word_embeddings": True}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models (text part), in the published dialect."""
    yarn = {"rope_type": "yarn", "rope_theta": 1000000000.0, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0}
    yarn |= {
        "original_max_position_embeddings": 16384,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return {
        "ministral3_14b": {
            "architectures": ["Ministral3ForCausalLM"],
            "model_type": "ministral3",
            "vocab_size": 131072,
            "hidden_size": 5120,
            "intermediate_size": 16384,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-5,
            "rope_parameters": yarn,
        },
    }


def sizes() -> dict[str, int]:
    """{name: number of parameters}: counted from the shapes, since the published 14B include a vision tower."""
    return {"ministral3_14b": 13_506_073_600}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "ministral-3-3b": 3_429_006_336,
    "ministral-3-8b": "8.4B",
    "ministral-3-14b": "13.5B",
}

NO_FILE = {"ministral3": "published within a wrapper's text_config"}

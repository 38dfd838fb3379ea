"""Tiny configurations of EXAONE 4.0, one per variation of its maths, and its published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "exaone4",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}; the last has both the list and a pattern, which is not read."""
    full, sliding = "full_attention", "sliding_attention"
    rope = LLAMA3 | {"rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 16}
    everywhere = {"sliding_window": None, "layer_types": [full, full], "num_hidden_layers": 2}
    listed = {"sliding_window_pattern": "LG", "layer_types": [full, sliding, sliding], "num_hidden_layers": 3}
    return {
        "exaone4": TINY | {"sliding_window": 6, "sliding_window_pattern": 3, "head_dim": 10},
        "exaone4_full_tied_llama3": TINY | everywhere | {"tie_word_embeddings": True, "rope_parameters": rope},
        "exaone4_listed": TINY | listed | {"sliding_window": 5},
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, in the published dialect."""
    return {
        "exaone_4_0_32b": {
            "architectures": ["Exaone4ForCausalLM"],
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 361,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 27392,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16,
            "max_position_embeddings": 131072,
            "model_type": "exaone4",
            "num_attention_heads": 40,
            "num_hidden_layers": 64,
            "num_key_value_heads": 8,
            "pad_token_id": 0,
            "rms_norm_eps": 1e-5,
            "rope_scaling": LLAMA3 | {"factor": 16.0, "original_max_position_embeddings": 8192},
            "rope_theta": 1000000,
            "sliding_window": 4096,
            "sliding_window_pattern": "LLLG",
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 102400,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published model: number of parameters}; published as 32.0B, counted by hand."""
    return {"exaone_4_0_32b": 32_003_216_384}


TOTALS: dict[str, int | str] = {"exaone-4.0-1.2b": 1_279_391_488, "exaone-4.0-32b": 32_003_216_384}

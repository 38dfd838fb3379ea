"""Tiny configurations of HRM-Text, one per way in which its maths can differ, and its published sizes."""

from typing import Any

NO_FILE = {"hrm_text": "the published file is not at hand; these are the defaults of transformers"}
# Refused beside a num_hidden_layers that it contradicts, and biases, whose names on disk no file shows.
REFUSED = {"hrm_text": {"num_layers_per_stack", "attention_bias", "mlp_bias"}}

TINY: dict[str, Any] = {
    "model_type": "hrm_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 1,  # of each stack
    "num_attention_heads": 4,
    "head_dim": 6,
    "H_cycles": 2,
    "L_cycles": 2,
    "L_bp_cycles": [2, 2],  # of all passes, as differences of two forwards have them
    "embedding_scale": 10.0,  # so that errors of fp32 do not grow with the passes
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    deep = {"num_hidden_layers": 2, "H_cycles": 1}
    return {"hrm_text": TINY | {"tie_word_embeddings": True}, "hrm_text_deep": TINY | deep}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the published model."""
    own = {"architectures": ["HrmTextForCausalLM"], "vocab_size": 151808, "hidden_size": 1536, "head_dim": 128}
    own |= {"intermediate_size": 4096, "num_hidden_layers": 128, "num_layers_per_stack": 16, "num_attention_heads": 12}
    own |= {"H_cycles": 2, "L_cycles": 3, "L_bp_cycles": [2], "embedding_scale": 50.0, "prefix_lm": True}
    own |= {"max_position_embeddings": 2048, "hidden_act": "silu", "rms_norm_eps": 1e-6, "use_cache": True}
    own |= {"attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02}
    ropes = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return {"hrm_text_1b": {"model_type": "hrm_text", "tie_word_embeddings": False} | own | ropes}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"hrm_text_1b": 1_447_822_848}


TOTALS: dict[str, int | str] = {"hrm-text-1b": 1_447_822_848}

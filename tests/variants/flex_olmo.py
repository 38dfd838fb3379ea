"""Tiny configuration of FlexOlmo, and its published size."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "flex_olmo",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "attention_bias": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    "pad_token_id": 0,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"flex_olmo": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the published size, by the defaults of transformers."""
    return {
        "flex_olmo_7x7b": {
            "architectures": ["FlexOlmoForCausalLM"],
            "model_type": "flex_olmo",
            "vocab_size": 100352,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_experts": 7,
            "num_experts_per_tok": 5,
            "max_position_embeddings": 4096,
            "rope_theta": 500000,
        }
    }


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes; published as 33B (7 experts)."""
    D = 4096
    layer = 4 * D * D + 2 * D + 2 * D + 7 * 3 * D * 11008 + 7 * D
    return {"flex_olmo_7x7b": 2 * 100352 * D + D + 32 * layer}


ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")  # as in transformers 5.24
SEEDS = {"flex_olmo": 23}

TOTALS: dict[str, int | str] = {"flex-olmo-7x7b": "33B"}

"""Tiny configuration of AFMoE, and its published size."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "afmoe",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 12,
    "num_experts": 6,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_dense_layers": 1,
    "route_scale": 1.6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 5,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "mup_enabled": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEPARATE = {"packed": "positions do not reach its masks, so that attention sees the document before"}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"afmoe": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of a published size."""
    return {
        "trinity_mini": {
            "architectures": ["AfmoeForCausalLM"],
            "model_type": "afmoe",
            "vocab_size": 200192,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 1024,
            "num_hidden_layers": 32,
            "num_dense_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "route_scale": 2.826,
            "route_norm": True,
            "score_func": "sigmoid",
            "n_group": 1,
            "topk_group": 1,
            "global_attn_every_n_layers": 4,
            "sliding_window": 2048,
            "mup_enabled": True,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000,
            "tie_word_embeddings": False,
        }
    }


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes; published as 26B."""
    D, H = 2048, 128
    attention = 3 * D * 32 * H + 2 * D * 4 * H + 2 * H + 4 * D
    sparse = 129 * 3 * D * 1024 + 128 * D + 128
    return {"trinity_mini": 2 * 200192 * D + D + 32 * attention + 30 * sparse + 2 * 3 * D * 6144}


ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")  # as in transformers 5.24

TOTALS: dict[str, int | str] = {"trinity-mini": "26B"}

"""Tiny configuration of Phi-3.5-MoE, and its published size."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "phimoe",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "router_jitter_noise": 0.3,
    "attention_bias": True,
    "lm_head_bias": True,
    "sliding_window": 5,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"phimoe": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the published model; the factors of its longrope are stand-ins."""
    rope: dict[str, Any] = {"type": "longrope", "original_max_position_embeddings": 4096}
    rope |= {"short_factor": [1.0] * 64, "long_factor": [1.5] * 64}
    rope |= {"short_mscale": 1.243163121016122, "long_mscale": 1.243163121016122}
    return {
        "phi_3_5_moe": {
            "architectures": ["PhiMoEForCausalLM"],
            "model_type": "phimoe",
            "vocab_size": 32064,
            "hidden_size": 4096,
            "intermediate_size": 6400,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 16,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "hidden_dropout": 0.0,
            "input_jitter_noise": 0.01,
            "router_jitter_noise": 0.01,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_scaling": rope,
            "rope_theta": 10000.0,
            "sliding_window": 131072,
            "tie_word_embeddings": False,
        }
    }


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes; published as 16x3.8B, 42B in all."""
    D = 4096
    attention = 2 * D * D + 2 * D * 1024 + 2 * D + 2 * 1024
    layer = attention + 16 * 3 * D * 6400 + 16 * D + 4 * D
    return {"phi_3_5_moe": 2 * 32064 * D + 32064 + 2 * D + 32 * layer}


ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")
REFUSED = {"phimoe": {"num_experts_per_tok"}}  # which transformers ignores
SEEDS = {"phimoe": 2}

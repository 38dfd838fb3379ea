"""Tiny configuration of Jamba, and its published size."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "jamba",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "expert_layer_period": 3,
    "expert_layer_offset": 2,
    "attn_layer_period": 3,
    "attn_layer_offset": 0,
    "mamba_expand": 1,
    "mamba_d_state": 3,
    "mamba_dt_rank": 5,
    "mamba_d_conv": 3,
    "mamba_proj_bias": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.05,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"jamba": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} as published."""
    return {
        "jamba_v0_1": {
            "architectures": ["JambaForCausalLM"],
            "model_type": "jamba",
            "vocab_size": 65536,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 256,
            "mamba_conv_bias": True,
            "mamba_inner_layernorms": True,
            "calc_logits_for_entire_prompt": False,
            "n_ctx": 262144,
            "mamba_proj_bias": False,
            "num_logits_to_keep": 1,
            "sliding_window": None,
            "use_mamba_kernels": True,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144,
        }
    }


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes; published as 52B."""
    D, I = 4096, 8192
    mamba = D * 2 * I + I * 5 + I * 288 + 288 + 256 * I + I + 16 * I + I + I * D
    attention = 2 * D * D + 2 * D * 1024
    sparse, dense = 16 * 3 * D * 14336 + 16 * D, 3 * D * 14336
    return {"jamba_v0_1": 2 * 65536 * D + D + 28 * mamba + 4 * attention + 16 * (sparse + dense) + 32 * 2 * D}


ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")  # as in transformers 5.24
SEPARATE = {
    "packed": "the convolution and the state run on from one document into the next",
    "left": "a bias of the projection before the convolution is seen in padding",
}

TOTALS: dict[str, int | str] = {"jamba-v0.1": 51_570_323_328}  # published as 52B
SEEDS = {"jamba": 1}

"""Tiny configurations of Laguna and Mellum 2, one per variation of their maths, and their sizes."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "laguna",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "sliding_window": 5,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0, "partial_rotary_factor": 1.0},
    },
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    laguna = {"shared_expert_intermediate_size": 20, "moe_routed_scaling_factor": 1.6, "gating": "per-head"}
    laguna |= {"num_attention_heads_per_layer": [4, 6, 4], "moe_router_logit_softcapping": 1.5}
    ropes = {name: rope | {"partial_rotary_factor": 1.0} for name, rope in TINY["rope_parameters"].items()}
    mellum = {"model_type": "mellum", "rope_parameters": ropes, "attention_bias": True, "norm_topk_prob": True}
    own = {"gating": "per-element", "attention_bias": True, "moe_router_logit_softcapping": 0.0}
    own |= {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "mlp_layer_types": ["sparse"] * 2}
    own |= {"num_attention_heads_per_layer": [4, 4], "tie_word_embeddings": True}
    return {"laguna": TINY | laguna, "laguna_per_element": TINY | laguna | own, "mellum": TINY | mellum}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the sizes that transformers names, by its defaults."""
    laguna: dict[str, Any] = {
        "architectures": ["LagunaForCausalLM"],
        "model_type": "laguna",
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 40,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "sliding_window": 512,
        "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 10,
        "num_attention_heads_per_layer": [48, 64, 64, 64] * 10,
    }
    mellum: dict[str, Any] = {
        "architectures": ["MellumForCausalLM"],
        "model_type": "mellum",
        "vocab_size": 98304,
        "hidden_size": 2304,
        "intermediate_size": 7168,
        "num_hidden_layers": 28,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": 896,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 7,
    }
    return {"laguna_xs": laguna, "mellum2_12b": mellum}


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes; Mellum 2 is published as 12B."""
    D, H = 2048, 128
    by_heads = {n: 2 * D * n * H + 2 * D * 8 * H + D * n + 2 * H + 2 * D for n in (48, 64)}
    sparse = 257 * 3 * D * 512 + 256 * D + 256
    laguna = 2 * 100352 * D + D + 10 * by_heads[48] + 30 * by_heads[64] + 39 * sparse + 3 * D * 8192
    layer = 2 * 2304 * 32 * H + 2 * 2304 * 4 * H + 2 * H + 2 * 2304 + 64 * 3 * 2304 * 896 + 64 * 2304
    return {"laguna_xs": laguna, "mellum2_12b": 2 * 98304 * 2304 + 2304 + 28 * layer}


ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")  # as in transformers 5.24
SEEDS = {"mellum": 4}
REFUSED = {"laguna": {"layer_types", "num_attention_heads_per_layer"}}  # heads follow from the layer type
BLIND = {
    "laguna": {"norm_topk_prob"},
    "laguna_per_element": {"norm_topk_prob", "intermediate_size", "num_attention_heads", "rope.partial", "rope.theta"},
    "mellum": {"gate_per_head", "moe_routed_scaling_factor", "moe_router_logit_softcapping"},
}

TOTALS: dict[str, int | str] = {"laguna-xs.2": "33B", "mellum2-12b-a2.5b": "12B"}

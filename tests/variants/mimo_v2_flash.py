"""Tiny configuration of MiMo-V2-Flash, and its published size."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "mimo_v2_flash",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "v_head_dim": 8,
    "attention_value_scale": 0.6,
    "attention_bias": True,
    "moe_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.6,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["sparse", "dense", "sparse"],
    "sliding_window": 5,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.334},
        "sliding_attention": {"rope_type": "default", "rope_theta": 20.0, "partial_rotary_factor": 0.334},
    },
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_nextn_predict_layers": 0,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"mimo_v2_flash": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} as published."""
    pattern = [int(i > 0 and (i + 1) % 6 > 0) for i in range(48)]
    return {
        "mimo_v2_flash": {
            "architectures": ["MiMoV2FlashForCausalLM"],
            "model_type": "mimo_v2_flash",
            "vocab_size": 152576,
            "hidden_size": 4096,
            "intermediate_size": 16384,
            "num_hidden_layers": 48,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 192,
            "v_head_dim": 128,
            "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 8,
            "swa_head_dim": 192,
            "swa_v_head_dim": 128,
            "swa_rope_theta": 10000,
            "rope_theta": 5000000,
            "partial_rotary_factor": 0.334,
            "hybrid_layer_pattern": pattern,
            "moe_layer_freq": [0] + [1] * 47,
            "sliding_window": 128,
            "sliding_window_size": 128,
            "add_full_attention_sink_bias": False,
            "add_swa_attention_sink_bias": True,
            "attention_value_scale": 0.707,
            "attention_bias": False,
            "layernorm_epsilon": 1e-05,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": None,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "routed_scaling_factor": None,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
        }
    }


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes; published as 309B, with 0.33B in each MTP head."""
    D = 4096
    full, near = (D * (64 * 192 + kv * (192 + 128) + 64 * 128) + 2 * D for kv in (4, 8))
    sparse = 256 * 3 * D * 2048 + 256 * D + 256
    layers = 9 * full + 39 * (near + 64) + 47 * sparse + 3 * D * 16384
    head = 2 * D * D + 3 * D + near + 64 + 3 * D * 16384
    return {"mimo_v2_flash": 2 * 152576 * D + D + layers + 3 * head}


TOTALS: dict[str, int | str] = {"mimo-v2-flash": 308_778_780_864 + 3 * 329_273_408}
ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")  # as in transformers 5.24
SEEDS = {"mimo_v2_flash": 6}

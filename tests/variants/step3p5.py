"""Tiny configurations of Step 3.5 with every kind of layer, and its published size."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

_FULL, _NEAR = "full_attention", "sliding_attention"
_LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0}
TINY: dict[str, Any] = {
    "model_type": "step3p5",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_sliding_attention_heads": 6,
    "head_dim": 8,
    "query_pre_attn_scalar": 60,
    "attention_bias": True,
    "moe_intermediate_size": 12,
    "share_expert_dim": 20,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "moe_router_scaling_factor": 1.6,
    "layer_types": [_FULL, _NEAR, _FULL],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "swiglu_limits": [None, 0.4, 0.3],
    "swiglu_limits_shared": [0.6, 0.0, 0.5],
    "sliding_window": 5,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {
        _FULL: _LLAMA3 | {"rope_theta": 40.0, "partial_rotary_factor": 0.5, "original_max_position_embeddings": 20},
        _NEAR: {"rope_type": "default", "rope_theta": 20.0, "partial_rotary_factor": 1.0},
    },
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}; without limits, with one number of heads and a tied head in the second."""
    plain = {name: value for name, value in TINY.items() if "swiglu" not in name and name != "query_pre_attn_scalar"}
    plain |= {"num_hidden_layers": 2, "layer_types": [_NEAR, _FULL], "mlp_layer_types": ["sparse", "dense"]}
    plain |= {"num_sliding_attention_heads": 4, "attention_bias": False, "tie_word_embeddings": True}
    return {"step3p5": TINY, "step3p5_plain_tied": plain}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} as published."""
    return {"step_3_5_flash": FILES["step-3.5-flash"]}


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes; published as 196B and three heads of 0.81B."""
    D, H = 4096, 128
    full, near = (2 * D * n * H + 2 * D * 8 * H + D * n + 2 * H + 2 * D for n in (64, 96))
    sparse = 289 * 3 * D * 1280 + 288 * D + 288
    head = 2 * D * D + 3 * D + near + 3 * D * 11264 + 128896 * D
    return {"step_3_5_flash": 2 * 128896 * D + D + 12 * full + 33 * near + 42 * sparse + 3 * 3 * D * 11264 + 3 * head}


# As published, but for the code that it names.
FILES: dict[str, dict[str, Any]] = {
    "step-3.5-flash": {
        "architectures": ["Step3p5ForCausalLM"],
        "model_type": "step3p5",
        "rope_scaling": _LLAMA3 | {"original_max_position_embeddings": 131072},
        "yarn_only_types": [_FULL],
        "hidden_size": 4096,
        "intermediate_size": 11264,
        "num_hidden_layers": 45,
        "max_seq_len": 262144,
        "vocab_size": 128896,
        "torch_dtype": "bfloat16",
        "use_qk_norm": True,
        "moe_layers_enum": ",".join(map(str, range(3, 45))),
        "num_attention_heads": 64,
        "num_attention_groups": 8,
        "head_dim": 128,
        "use_moe": True,
        "moe_num_experts": 288,
        "moe_top_k": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "moe_layer_offset": 0,
        "moe_every_n_layer": 1,
        "norm_expert_weight": True,
        "moe_router_activation": "sigmoid",
        "moe_router_scaling_factor": 3.0,
        "att_impl_type": "GQA",
        "tie_word_embeddings": False,
        "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] * 12,
        "use_head_wise_attn_gate": True,
        "sliding_window": 512,
        "use_moe_router_bias": True,
        "need_fp32_gate": True,
        "sink": False,
        "layer_types": [_FULL, _NEAR, _NEAR, _NEAR] * 12,
        "use_rope_layers": [],
        "num_nextn_predict_layers": 3,
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
        "attention_other_setting": {
            "attention_type": _NEAR,
            "num_attention_heads": 96,
            "num_attention_groups": 8,
            "head_dim": 128,
            "true_head_dim": 128,
        },
        "swiglu_limits": [0.0] * 43 + [7.0, 7.0] + [0.0] * 3,
        "swiglu_limits_shared": [0.0] * 44 + [16.0] + [0.0] * 3,
        "zero_centered": True,
        "max_position_embeddings": 262144,
    }
}
# 196B and three MTP heads, each with an output head of its own.
TOTALS: dict[str, int | str] = {"step-3.5-flash": "199B"}
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")  # as in transformers 5.24
SEEDS = {"step3p5": 2}
# transformers takes "silu" whatever the file says, and the published number of experts before the other one; no
# published model has biases of MLPs.
REFUSED = {"step3p5": {"hidden_act", "mlp_bias", "num_local_experts"}}

"""Tiny configurations of MiniMax M2, one per variation of its maths, and its published sizes."""

import json
from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "minimax_m2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SEEDS = {"minimax_m2_full_yarn_tied": 3}
REFUSED = {"minimax_m2": {"router_jitter_noise"}}  # noise in training, which no published model has
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")  # as in transformers 5.23


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}; the full head rotates in the second."""
    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5}
    full = {"rope_parameters": yarn | {"original_max_position_embeddings": 16}, "head_dim": 12}
    full |= {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
    return {"minimax_m2": TINY, "minimax_m2_full_yarn_tied": TINY | full}


# The complete published config.json of M2; its rotary_dim is a partial rotary factor of 0.5.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "minimax-m2": {
    "architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
    1, 1, 1, 1, 1, 1], "auto_map": {"AutoConfig": "configuration_minimax_m2.MiniMaxM2Config", "AutoModelForCausalLM":
    "modeling_minimax_m2.MiniMaxM2ForCausalLM"}, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
    "intermediate_size": 1536, "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 8192, "shared_moe_mode": "sigmoid",
    "max_position_embeddings": 196608, "model_type": "minimax_m2", "mtp_transformer_layers":
    1, "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
    "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "quantization_config":
    {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}, "rms_norm_eps": 1e-06, "rope_theta":
    5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0, "tie_word_embeddings": false,
    "torch_dtype": "bfloat16", "use_cache": true, "use_mtp": true, "use_qk_norm": true, "use_routing_bias": true,
    "vocab_size": 200064
  }
}""")
CONTRADICTIONS = [
    ("minimax-m2", {"layernorm_mlp_alpha": 3.5}, "'layernorm_mlp_alpha' is 3.5; only 1.0 is supported"),
    ("minimax-m2", {"layernorm_full_attention_beta": 2.0}, "'layernorm_full_attention_beta' is 2.0; only 1.0"),
    ("minimax-m2", {"postnorm": True}, "'postnorm' is true; only false"),
    ("minimax-m2", {"partial_rotary_factor": 0.25}, "'rotary_dim' and 'partial_rotary_factor' disagree"),
    ("minimax-m2", {"attn_type_list": [0] * 62}, "'attn_type_list' is"),
]


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of M2, as published."""
    return {"minimax_m2": FILES["minimax-m2"]}


def sizes() -> dict[str, int]:
    """{name: number of parameters}; with 13,880,064 scales of fp8 blocks it is the published 228,703,644,928."""
    return {"minimax_m2": 228_689_764_864}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {"minimax-m2": 228_689_764_864}

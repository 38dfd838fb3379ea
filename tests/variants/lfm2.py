"""Tiny configurations of LFM2, one per way in which its maths can differ, and its published sizes."""

import json
from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 60,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "norm_eps": 1e-2,
    "layer_types": ["conv", "conv", "full_attention"],
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": True,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    adjusted = {"block_auto_adjust_ff_dim": True, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3}
    own = {"conv_bias": True, "conv_L_cache": 4, "tie_word_embeddings": False}
    moe = {name: value for name, value in TINY.items() if name != "block_auto_adjust_ff_dim"}
    moe |= {"model_type": "lfm2_moe", "moe_intermediate_size": 20, "num_experts": 5, "num_experts_per_tok": 2}
    moe |= {"num_dense_layers": 1, "routed_scaling_factor": 1.5}
    plain = {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0, "num_hidden_layers": 2}
    return {
        "lfm2": TINY,
        "lfm2_moe": moe,
        "lfm2_moe_plain": moe | plain | {"layer_types": ["full_attention", "conv"]},
        "lfm2_bias_untied": TINY | own | adjusted | {"layer_types": ["full_attention", "conv", "conv"]},
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member of each type."""
    return {"lfm2_1.2b": FILES["lfm2-1.2b"], "lfm2_8b_a1b": FILES["lfm2-8b-a1b"]}


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has, as published}; 8B's with its 704 selection biases."""
    return {"lfm2_1.2b": 1_170_340_608, "lfm2_8b_a1b": 8_339_930_560}


OLDER_NAMES = {"tie_word_embeddings": "tie_embedding", "intermediate_size": "block_ff_dim"}
SEPARATE = {
    "packed": "the convolution runs on from one document into the next",
    "left": "a bias of the projection before the convolution is seen in padding",
}

ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")  # 5.23: scores in bf16 too
EXPERTS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "use_expert_bias", "norm_topk_prob"}
EXPERTS |= {"routed_scaling_factor"}
SEEDS = {"lfm2_moe_plain": 4}
BLIND = {"lfm2": EXPERTS, "lfm2_bias_untied": EXPERTS, "lfm2_moe_plain": {"intermediate_size"}}

TOTALS: dict[str, int | str] = {"lfm2-350m": 354_483_968, "lfm2-1.2b": 1_170_340_608, "lfm2-8b-a1b": "8.3B"}

FILES: dict[str, dict[str, Any]] = json.loads("""{
  "lfm2-1.2b": {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": true, "block_dim": 2048,
    "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256,
    "block_norm_eps": 1e-05, "block_out_init_scale": 1.0, "block_use_swiglu": true, "block_use_xavier_init": true,
    "bos_token_id": 1, "conv_L_cache": 3, "conv_bias": false, "conv_dim": 2048, "conv_dim_out": 2048,
    "conv_use_xavier_init": true, "eos_token_id": 7, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048,
    "initializer_range": 0.02, "max_position_embeddings": 128000, "norm_eps": 1e-05, "num_attention_heads": 32,
    "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
    "tie_embedding": true, "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": true,
    "use_pos_enc": true, "vocab_size": 65536
  },
  "lfm2-8b-a1b": {
    "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "bos_token_id": 1, "conv_L_cache": 3,
    "conv_bias": false, "dtype": "bfloat16", "eos_token_id": 7, "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 7168, "layer_types": [
      "conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention", "conv", "conv", "conv",
      "full_attention", "conv", "conv", "conv", "full_attention", "conv", "conv", "conv", "full_attention", "conv",
      "conv", "full_attention", "conv", "conv"
    ],
    "max_position_embeddings": 128000, "moe_intermediate_size": 1792, "norm_eps": 1e-05, "norm_topk_prob": true,
    "num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "pad_token_id": 0, "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0, "tie_word_embeddings": true, "transformers_version": "4.57.0.dev0",
    "use_cache": true, "use_expert_bias": true, "vocab_size": 65536
  }
}""")

"""Tiny configurations of Granite 4, one per way in which its maths can differ, and its published sizes."""

import json
from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "granitemoehybrid",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 20,
    "shared_intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "time_step_limit": [0.0, 9.0],  # which no step reaches: transformers does not clamp those of generated tokens
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}: with experts and without positions, and neither."""
    own = {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3, "mamba_n_groups": 1}
    own |= {"mamba_expand": 3, "mamba_n_heads": 6, "time_step_limit": [0.3, 1.0]}
    dense = {"num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope"}
    dense |= {"layer_types": ["full_attention", "linear_attention"]}
    dense |= {"attention_bias": True, "tie_word_embeddings": True, "logits_scaling": 1.5}
    return {"granitemoehybrid": TINY, "granitemoehybrid_dense_tied": TINY | own | dense}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    return {"granite_4_0_h_small": FILES["granite-4.0-h-small"]}


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has, as published}."""
    return {"granite_4_0_h_small": 32_207_337_984}


SEEDS = {"granitemoehybrid": 2}
SEPARATE = {
    "packed": "the convolution and the state run on from one document into the next, and attention sees the one before",
    "left": "a bias of the projection before the convolution is seen in padding",
}
BLIND = {
    "granitemoehybrid": {"rope.theta", "rope.partial", "mixer.limits"},
    "granitemoehybrid_dense_tied": {"intermediate_size", "num_local_experts", "num_experts_per_tok"},
}

TOTALS: dict[str, int | str] = {
    "granite-4.0-h-small": 32_207_337_984,
    "granite-4.0-h-tiny": 6_939_037_248,
    "granite-4.0-h-micro": 3_191_396_096,
    "granite-4.0-micro": 3_402_836_480,
}

FILES: dict[str, dict[str, Any]] = json.loads("""{
  "granite-4.0-h-small": {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "attention_bias": false,
    "attention_dropout": 0.0, "attention_multiplier": 0.0078125, "bos_token_id": 100257, "embedding_multiplier": 12,
    "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "init_method": "mup", "initializer_range": 0.1,
    "intermediate_size": 768, "layer_types": [
      "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba",
      "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba",
      "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba",
      "mamba", "mamba", "mamba", "mamba", "mamba", "attention", "mamba", "mamba", "mamba", "mamba"],
    "logits_scaling": 16, "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": false,
    "max_position_embeddings": 131072, "normalization_function": "rmsnorm", "num_attention_heads": 32,
    "num_experts_per_tok": 10, "num_hidden_layers": 40, "num_key_value_heads": 8, "num_local_experts": 72,
    "output_router_logits": false, "pad_token_id": 100256, "position_embedding_type": "nope",
    "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000,
    "router_aux_loss_coef": 0.0, "shared_intermediate_size": 1536, "tie_word_embeddings": true,
    "torch_dtype": "bfloat16", "transformers_version": "4.56.0", "use_cache": true, "vocab_size": 100352
  }
}""")

ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")  # as in transformers 5.23

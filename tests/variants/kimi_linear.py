"""Tiny configurations of Kimi Linear, one per way in which its maths can differ, and its published sizes."""

import json
from typing import Any

from torch import Tensor

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "kimi_linear",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "num_local_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 64,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "linear_num_heads": 2,
    "linear_head_dim": 10,
    "tie_word_embeddings": False,
    # the defaults are outside of this vocabulary
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    groups = {"num_expert_group": 3, "topk_group": 2, "moe_renormalize": False, "q_lora_rank": 14}
    own = {
        "attention_bias": True,
        "num_shared_experts": 1,
        "first_k_dense_replace": 2,
        "hidden_act": "gelu_pytorch_tanh",
    }
    linear = {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 5, "num_heads": 3, "short_conv_kernel_size": 3}
    names = {"num_local_experts": "num_experts", "n_shared_experts": "num_shared_experts"}  # as published
    names |= {"num_experts_per_tok": "num_experts_per_token", "max_position_embeddings": "model_max_length"}
    kept = {names.get(n, n): v for n, v in TINY.items() if "layer_types" not in n and not n.startswith("linear_")}
    return {"kimi_linear": TINY, "kimi_linear_groups": kept | groups | own | {"linear_attn_config": linear}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    return {"kimi_linear_48b_a3b": FILES["kimi-linear-48b-a3b"]}


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has, selection biases included}."""
    return {"kimi_linear_48b_a3b": 49_122_681_728}


def as_published(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Dense layers under their own name."""
    dense = tuple(f"block_sparse_moe.{name}_proj.weight" for name in ("gate", "up", "down"))
    return {n.replace("block_sparse_moe", "mlp") if n.endswith(dense) else n: t for n, t in tensors.items()}


# The first alone contradicts another field, the second is ignored by transformers.
REFUSED = {"kimi_linear": {"num_attention_heads", "tie_word_embeddings"}}
SEPARATE = {"packed": "the convolution and the state run on from one document into the next"}
# Of those that use every expert: with others either implementation's fp32 gradients are up to 2e-4 off those of fp64.
SEEDS = {"kimi_linear": 8, "kimi_linear_groups": 11}
TOTALS: dict[str, int | str] = {"kimi-linear-48b-a3b": 49_122_681_728}

FILES: dict[str, dict[str, Any]] = json.loads("""{
  "kimi-linear-48b-a3b": {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear",
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig",
    "AutoModelForCausalLM": "modeling_kimi.KimiLinearForCausalLM"},
    "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163586, "first_k_dense_replace": 1, "head_dim": 72,
    "hidden_act": "silu", "hidden_size": 2304, "initializer_range": 0.02, "intermediate_size": 9216,
    "kv_lora_rank": 512, "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
    "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26], "num_heads": 32,
    "short_conv_kernel_size": 4}, "mla_use_nope": true, "model_max_length": 1048576, "moe_intermediate_size": 1024,
    "moe_layer_freq": 1, "moe_renormalize": true, "moe_router_activation_func": "sigmoid", "num_attention_heads": 32,
    "num_expert_group": 1, "num_experts": 256, "num_experts_per_token": 8, "num_hidden_layers": 27,
    "num_key_value_heads": 32, "num_nextn_predict_layers": 0, "num_shared_experts": 1, "pad_token_id": 163839,
    "q_lora_rank": null, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": null,
    "rope_theta": 10000.0, "routed_scaling_factor": 2.446, "tie_word_embeddings": false, "topk_group": 1,
    "use_cache": true, "use_grouped_topk": true, "v_head_dim": 128, "vocab_size": 163840
  }
}""")

ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")  # as in transformers 5.23
TRAINING_TOLERANCE = {"kimi_linear": 2e-5}  # fp32 itself: the difference is 0.3e-5 (AVX2) or 1.0e-5 (AVX-512)

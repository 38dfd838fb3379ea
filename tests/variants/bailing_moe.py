"""Tiny configurations of Ling 2, one per way in which its maths can differ, of Ling 1, and published sizes.

transformers has neither: tests/fnmodels/models/test_bailing_moe.py compares them with a written-out reference.
"""

import json
from typing import Any

from fnmodels.models.decoder import bailing_moe
from fnmodels.ops.moe.router import RouterDtypes

ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
# Under the published names.
TINY: dict[str, Any] = {
    "architectures": ["BailingMoeV2ForCausalLM"],
    "model_type": "bailing_moe",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "moe_intermediate_size": 20,
    "num_experts": 8,
    "num_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.6,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "use_qk_norm": True,
    "num_nextn_predict_layers": 0,
    "rope_theta": 50.0,
    "partial_rotary_factor": 0.5,
    "score_function": "sigmoid",
}
FIRST: dict[str, Any] = {
    "architectures": ["BailingMoeForCausalLM"],
    "model_type": "bailing_moe",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 6,
    "num_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_theta": 50.0,
    "use_bias": True,
    "use_qkv_bias": True,
    "num_nextn_predict_layers": 0,
}


def variants() -> dict[str, Any]:
    """{name: Config}: transformers reads neither file."""
    files = {"bailing_moe": TINY, "bailing_moe_softmax": FIRST}
    files["bailing_moe_v2"] = TINY | {"model_type": "bailing_moe_v2"}
    return {name: bailing_moe.Config.from_hf(values) for name, values in files.items()}


BLIND = {"bailing_moe_softmax": {"intermediate_size"}}  # no dense layer


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    return {"ling_flash_2": FILES["ling-flash-2.0"]}


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has}, counted from the shapes; published as 100B."""
    return {"ling_flash_2": 102_889_705_216}


# Counted from the shapes; published as 16B and 100B.
TOTALS: dict[str, int | str] = {"ling-mini-2.0": "16B", "ling-flash-2.0": 102_889_705_216}

FILES: dict[str, dict[str, Any]] = json.loads("""{
  "ling-flash-2.0": {
    "architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe", "attention_dropout": 0.0,
    "embedding_dropout": 0.0, "eos_token_id": 156892, "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 9216, "max_position_embeddings": 32768,
    "max_window_layers": 28, "moe_intermediate_size": 1024, "moe_router_enable_expert_bias": true,
    "moe_shared_expert_intermediate_size": 1024, "mtp_loss_scaling_factor": 0, "n_group": 8, "norm_head": false,
    "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 256, "num_experts_per_tok": 8,
    "num_hidden_layers": 32, "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "num_shared_experts": 1,
    "output_dropout": 0.0, "output_router_logits": false, "pad_token_id": 156892, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 600000, "rotary_dim": 64,
    "routed_scaling_factor": 2.5, "router_dtype": "fp32", "score_function": "sigmoid", "tie_word_embeddings": false,
    "topk_group": 4, "torch_dtype": "bfloat16", "use_bias": false, "use_cache": true, "use_qk_norm": true,
    "use_qkv_bias": false, "use_rmsnorm": true, "use_sliding_window": false,
    "using_split_qkv_in_self_attention": false, "vocab_size": 157184
  }
}""")

NO_FILE = {"bailing_moe_v2": "files of Ling 2 say bailing_moe"}

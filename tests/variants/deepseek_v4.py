"""Tiny configurations of DeepSeek V4, one per way in which its maths can differ, and its published sizes."""

import re
from typing import Any

from torch import Tensor

from fnmodels.models.decoder.deepseek_v4 import TRAITS
from fnmodels.ops.moe.router import RouterDtypes

# Fields of one value, and those that say alone what another one says too.
REFUSED: dict[str, set[str]] = {
    "deepseek_v4": {
        *("attention_bias", "attention_dropout", "head_dim", "mlp_bias", "norm_topk_prob", "num_hidden_layers"),
        *("partial_rotary_factor", "rope_parameters.compress.partial_rotary_factor"),
        *("rope_parameters.main.partial_rotary_factor", "router_jitter_noise", "scoring_func"),
    }
}
SEEDS = {"deepseek_v4": 3}  # the first whose choices are clear and that every tensor of an indexer has an effect on
SEPARATE = {
    "packed": "windows, and the keys of windows that queries see, are counted along the row",
    "left": "windows are counted from the padding",
}
# fp32 as in DeepSeek's own code; transformers 5.24 has the model's dtype.
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")

# Of the MTP head of Flash, from the shapes: attention, experts, norms, hyper-connections with the fold, projections.
_HEAD = 1024 * 4096 + 1024 + 64 * 512 * 1024 + 512 * 4096 + 512 + 64 + 8 * 1024 * 4096 + 4096 * 8 * 1024
_HEAD += 257 * 3 * 4096 * 2048 + 256 * 4096 + 256 + 5 * 4096 + 2 * (24 * 4 * 4096 + 24 + 3) + 4 * 4 * 4096 + 4 + 1
_HEAD += 2 * 4096 * 4096

TOTALS: dict[str, int | str] = {"deepseek-v4-flash": 284_334_567_511 + _HEAD}

# 16 index heads: a score is 0 where no head looks, and ties at the edge of the choice have no order in the reference.
TINY: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 61,
    "hidden_size": 32,
    "moe_intermediate_size": 10,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "partial_rotary_factor": 0.5,
    "q_lora_rank": 14,
    "o_lora_rank": 6,
    "o_groups": 2,
    "sliding_window": 6,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 3, "heavily_compressed_attention": 5},
    "index_n_heads": 16,
    "index_head_dim": 14,
    "index_topk": 3,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "swiglu_limit": 0.9,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-3,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
        "compress": {"rope_type": "default", "rope_theta": 90.0, "partial_rotary_factor": 0.5},
    },
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"deepseek_v4": TINY}


_FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],  # of the MTP module too
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "initializer_range": 0.02,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "vocab_size": 129280,
}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the published models."""
    return {"deepseek_v4_flash": _FLASH}


def sizes() -> dict[str, int]:
    """{name: number of parameters}, tables of experts by token id and the MTP head included."""
    return {"deepseek_v4_flash": 284_332_230_231 + 2_337_280 + _HEAD}


def as_published(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Under DeepSeek's names, some of which transformers 5.24 does not write."""
    return {_published(name): tensor for name, tensor in tensors.items()}


def _published(name: str) -> str:
    return next((re.sub(p, new, name) for p, new in TRAITS.resaved.items() if re.fullmatch(p, name)), name)

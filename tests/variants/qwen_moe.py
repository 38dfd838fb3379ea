"""Tiny configurations of Qwen's and OLMo's mixtures of experts, one per variation of their maths; published sizes."""

import json
from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": False,
}

# Without effect: the width of dense layers without any; layer kinds that are the same in reverse order.
BLIND = {
    "qwen2_moe": {"layer_kinds"},
    "qwen2_moe_sliding": {"intermediate_size"},
    "qwen3_moe": {"intermediate_size"},
    "qwen3_moe_sparse_step": {"layer_kinds"},
    "olmoe": {"intermediate_size"},
    "olmoe_clipped": {"intermediate_size"},
}


SEEDS = {"qwen2_moe": 1, "qwen3_moe": 4, "olmoe": 22, "olmoe_clipped": 3}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    second = TINY | {"model_type": "qwen2_moe", "num_experts": 5, "shared_expert_intermediate_size": 36}
    third = TINY | {"model_type": "qwen3_moe", "num_experts": 6, "head_dim": 12}
    olmoe = {name: value for name, value in TINY.items() if name != "moe_intermediate_size"}
    olmoe |= {"model_type": "olmoe", "num_experts": 7, "pad_token_id": 0, "eos_token_id": 2}  # below vocab_size
    window = {"use_sliding_window": True, "sliding_window": 5}
    return {
        "qwen2_moe": second | {"num_hidden_layers": 3, "mlp_only_layers": [1]},
        "qwen2_moe_sliding": second
        | {"num_hidden_layers": 3, "max_window_layers": 2, "norm_topk_prob": True, "qkv_bias": False}
        | {"tie_word_embeddings": True, **window},
        "qwen3_moe": third | {"norm_topk_prob": True},
        "qwen3_moe_sparse_step": third
        | {
            "num_hidden_layers": 3,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "num_experts_per_tok": 3,
            **window,
        },
        "olmoe": olmoe,
        "olmoe_clipped": olmoe | {"clip_qkv": 0.8, "attention_bias": True, "norm_topk_prob": True, "num_experts": 4},
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models, in the published dialect."""
    return {
        "qwen2_57b_a14b": {
            "architectures": ["Qwen2MoeForCausalLM"],
            "model_type": "qwen2_moe",
            "vocab_size": 151936,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "moe_intermediate_size": 2560,
            "shared_expert_intermediate_size": 20480,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "max_position_embeddings": 131072,
            "max_window_layers": 28,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": 65536,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
        },
        "qwen3_235b_a22b": {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "attention_bias": False,
            "max_position_embeddings": 40960,
            "max_window_layers": 94,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
        },
        "olmoe_1b_7b": {
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
            "attention_bias": False,
            "clip_qkv": None,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01,
            "tie_word_embeddings": False,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its published number of parameters}."""
    return {"qwen2_57b_a14b": 57_408_658_944, "qwen3_235b_a22b": 235_093_634_560, "olmoe_1b_7b": 6_919_161_856}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2-57b-a14b": "57.4B",
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
}

# The complete published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "qwen1.5-moe-a2.7b": {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "attention_dropout": 0.0, "bos_token_id":
    151643, "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048,
    "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
    "moe_intermediate_size": 1408, "norm_topk_prob": false, "num_attention_heads": 16, "num_experts": 60,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": false,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": false, "torch_dtype":
    "bfloat16", "transformers_version": "4.39.0.dev0", "use_cache": true, "use_sliding_window": false, "vocab_size":
    151936
  },
  "qwen3-30b-a3b": {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": false,
    "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim":
    128, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
    "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768,
    "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06,
    "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true,
    "use_sliding_window": false, "vocab_size": 151936
  },
  "olmoe-1b-7b": {
    "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "attention_bias": false, "attention_dropout": 0.0,
    "clip_qkv": null, "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 1024, "max_position_embeddings": 4096, "norm_topk_prob": false, "num_attention_heads": 16,
    "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
    "output_router_logits": false, "pad_token_id": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta":
    10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 50304
  }
}""")

# (file, change, error): duplicate fields in FILES with a contradicting value.
CONTRADICTIONS = [
    ("qwen3-30b-a3b", {"qkv_bias": True}, "'qkv_bias' is true; only false"),
    ("qwen3-30b-a3b", {"use_qk_norm": False}, "'use_qk_norm' is false; only true"),
    ("qwen3-30b-a3b", {"shared_expert_intermediate_size": 64}, "'shared_expert_intermediate_size' is 64; only 0"),
]

ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")  # as in transformers 5.23

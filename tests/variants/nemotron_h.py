"""Tiny configurations of Nemotron-H, one per way in which its maths can differ, and its published sizes."""

import json
from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "nemotron_h",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 2,
    "ssm_state_size": 12,
    "max_position_embeddings": 64,
    "layer_norm_epsilon": 1e-2,
    "time_step_min": 0.3,
    "bos_token_id": 1,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}: without experts, with all kinds of layers, and with experts of another width."""
    sparse = {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "time_step_min": 1e-3}
    sparse |= {"moe_shared_expert_intermediate_size": 28, "routed_scaling_factor": 1.7}
    own = {"moe_latent_size": 24, "n_group": 3, "topk_group": 2, "norm_topk_prob": False, "time_step_min": 0.2}
    own |= {"use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "n_groups": 1, "mlp_hidden_act": "silu"}
    return {
        "nemotron_h": TINY | {"hybrid_override_pattern": "M-*"},
        "nemotron_h_moe": TINY | sparse | {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
        "nemotron_h_latent_bias": TINY | sparse | own | {"hybrid_override_pattern": "E*M"},
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member whose file is known."""
    return {"nemotron_3_nano_30b_a3b": FILES["nemotron-3-nano-30b-a3b"]}


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has, as published}."""
    return {"nemotron_3_nano_30b_a3b": 31_577_940_288}


SEPARATE = {
    "packed": "the convolution and the state run on from one document into the next",
    "left": "a bias of the projection before the convolution is seen in padding",
}
# transformers reads no field for these, other code does, or it contradicts the publisher's code
REFUSED = {
    "nemotron_h": {
        *("attention_bias", "mlp_bias", "n_shared_experts", "sliding_window", "tie_word_embeddings"),
    }
}
_EXPERTS = {"n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_shared_expert_intermediate_size"}
_EXPERTS |= {"moe_latent_size", "n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor"}
BLIND = {
    "nemotron_h": _EXPERTS,
    "nemotron_h_moe": {"mixer.limits"},
    "nemotron_h_latent_bias": {"intermediate_size"},
}
WIDE_LOGITS = {"nemotron_h"}

TOTALS: dict[str, int | str] = {
    "nemotron-h-8b": 8_100_852_736,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "nemotron-nano-12b-v2": "12B",
    "nemotron-3-nano-30b-a3b": 31_577_940_288,
    "nemotron-3-super-120b-a12b": "120B",
}

FILES: dict[str, dict[str, Any]] = json.loads("""{
  "nemotron-3-nano-30b-a3b": {
    "architectures": ["NemotronHForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1,
    "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0,
    "hidden_size": 2688, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "initializer_range": 0.02, "intermediate_size": 1856, "layer_norm_epsilon": 1e-05, "mamba_head_dim": 64,
    "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": false, "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144, "mlp_bias": false, "mlp_hidden_act": "relu2", "model_type": "nemotron_h",
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-05, "norm_topk_prob": true,
    "num_attention_heads": 32, "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2,
    "num_logits_to_keep": 1, "pad_token_id": 0, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": true,
    "residual_in_fp32": false, "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": null,
    "ssm_state_size": 128, "tie_word_embeddings": false, "time_step_floor": 0.0001, "time_step_max": 0.1,
    "time_step_min": 0.001, "topk_group": 1, "torch_dtype": "bfloat16", "transformers_version": "4.55.4",
    "use_bias": false, "use_cache": true, "use_conv_bias": true, "use_mamba_kernels": true, "vocab_size": 131072
  }
}""")

ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")  # as in transformers 5.23

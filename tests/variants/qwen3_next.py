"""Tiny configurations of Qwen3-Next and Qwen3.5, one per way in which their maths can differ, and published sizes."""

import json
from typing import Any

from fnmodels.models.decoder import qwen3_next
from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "qwen3_next",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 4,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "full_attention"],
    "mtp_num_hidden_layers": 0,
}


FIVE = {name: value for name, value in TINY.items() if "intermediate_size" not in name and "experts" not in name}
FIVE |= {"rope_parameters": TINY["rope_parameters"] | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}}


def variants() -> dict[str, Any]:
    """{name: config.json or Config}."""
    own = {"mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True, "linear_conv_kernel_dim": 3}
    types = ["full_attention", "linear_attention", "linear_attention"]
    dense = FIVE | {"model_type": "qwen3_5_text", "intermediate_size": 44}
    moe = FIVE | {"model_type": "qwen3_5_moe_text", "moe_intermediate_size": 20, "num_experts": 5}
    moe |= {"num_experts_per_tok": 2, "shared_expert_intermediate_size": 28, "linear_value_head_dim": 18}
    read = qwen3_next.Config.from_hf
    return {
        "qwen3_next": TINY,
        "qwen3_next_dense_tied": TINY
        | own
        | {"num_hidden_layers": 3, "layer_types": types}
        | {"tie_word_embeddings": True, "linear_num_value_heads": 3, "linear_num_key_heads": 3},
        "qwen3_5": dense,
        "qwen3_5_tied": dense | {"tie_word_embeddings": True, "attention_bias": True, "linear_num_value_heads": 2},
        "qwen3_5_moe": moe,
        "qwen3_5_wrapped": read({"model_type": "qwen3_5", "text_config": dense}),
        "qwen3_5_moe_wrapped": read({"model_type": "qwen3_5_moe", "text_config": moe}),
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published members; of Qwen3.5, whose defaults transformers holds."""
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    five = {"vocab_size": 248320, "num_attention_heads": 16, "rope_parameters": rope}
    dense = {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_key_value_heads": 4}
    sparse = {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2, "num_experts": 256}
    sparse |= {"num_experts_per_tok": 8, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    return {
        "qwen3_next_80b_a3b": FILES["qwen3-next-80b-a3b"],
        "qwen3_5_9b": {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text"} | five | dense},
        "qwen3_5_35b_a3b": {
            "model_type": "qwen3_5_moe",
            "text_config": {"model_type": "qwen3_5_moe_text"} | five | sparse,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters its text model has, with its MTP head}."""
    return {
        "qwen3_next_80b_a3b": 81_324_862_720,
        "qwen3_5_9b": 9_197_093_888,
        "qwen3_5_35b_a3b": 35_505_251_456,
    }


NO_FILE = dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), "published within the text_config of another")
SEPARATE = {"packed": "the convolution and the state run on from one document into the next"}
# Without effect: the width of dense layers without any, and all that experts have without any.
EXPERTS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"}
EXPERTS |= {"norm_topk_prob"}
BLIND = {
    "qwen3_next": {"intermediate_size"},
    "qwen3_5": EXPERTS,
    "qwen3_5_tied": EXPERTS,
    "qwen3_5_moe": {"intermediate_size"},
    "qwen3_5_wrapped": EXPERTS,
    "qwen3_5_moe_wrapped": {"intermediate_size"},
}

TRAINING_TOLERANCE = {"qwen3_5_moe": 2e-5}  # the choice of experts is close in the last steps

TOTALS: dict[str, int | str] = {"qwen3-next-80b-a3b": 81_324_862_720}

FILES: dict[str, dict[str, Any]] = json.loads("""{
  "qwen3-next-80b-a3b": {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "attention_bias": false,
    "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645,
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "max_position_embeddings": 262144,
    "mlp_only_layers": [], "moe_intermediate_size": 512, "norm_topk_prob": true, "num_attention_heads": 16,
    "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "output_router_logits": false, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": null,
    "rope_theta": 10000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": true,
    "use_sliding_window": false, "vocab_size": 151936
  }
}""")

ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")  # as in transformers 5.23

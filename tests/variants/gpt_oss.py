"""Tiny configurations of gpt-oss, one per variation of its maths, and its published sizes.

24 tokens exceed the window and the original context. At theta 100 YaRN's ramp spans several dimension pairs and ends
between them, so that rounding its ends to integers changes the logits.
"""

import json
from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

# transformers builds its masks without positions, so that packed documents attend to each other.
SEPARATE = {"packed": "its masks do not tell documents apart"}

BLIND = {"gpt_oss_plain_tied": {"sliding_window"}}  # no sliding layer

SEEDS = {"gpt_oss": 10, "gpt_oss_truncated": 3}

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}

TINY: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 51,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "rope_parameters": YARN,
    "rms_norm_eps": 1e-2,
    "sliding_window": 5,
    "swiglu_limit": 1.0,  # clamps some values
    "tie_word_embeddings": False,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {
        "gpt_oss": TINY,
        "gpt_oss_plain_tied": TINY
        | {
            "vocab_size": 66,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0},
            "attention_bias": False,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "full_attention"],
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.1,
        },
        "gpt_oss_truncated": TINY
        | {
            "rope_parameters": YARN | {"truncate": True},
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
        },
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the published members, in the published dialect."""
    large = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": 200002,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "output_router_logits": False,
        "pad_token_id": 199999,
        "quantization_config": {
            "modules_to_not_convert": [
                *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"),
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 201088,
    }
    small = {"num_hidden_layers": 24, "num_local_experts": 32}
    small |= {"layer_types": ["sliding_attention", "full_attention"] * 12}
    return {"gpt_oss_120b": large, "gpt_oss_20b": large | small}


def sizes() -> dict[str, int]:
    """{name of a published model: number of parameters}; published as 117B (116.83B) and 21B (20.91B)."""
    return {"gpt_oss_120b": 116_829_156_672, "gpt_oss_20b": 20_914_757_184}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
}

# The complete published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "gpt-oss-20b": {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": true, "attention_dropout":
    0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880, "layer_types":
    ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
    "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    "sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention",
    "full_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention",
    "sliding_attention", "full_attention", "sliding_attention", "full_attention"], "max_position_embeddings":
    131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": false, "pad_token_id": 199999, "quantization_config":
    {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
    "lm_head"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow":
    1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": false, "transformers_version": "4.55.0.dev0", "use_cache": true, "vocab_size": 201088
  }
}""")

# Fields refused at any changed value: alone they contradict other fields, or no published model has them.
REFUSED = {
    "gpt_oss": {"hidden_act"},
}

ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")  # as in transformers 5.23

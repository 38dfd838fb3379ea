"""Tiny configurations of Mixtral, one per variation of its maths, and its published sizes."""

import json
from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": False,
}


SEEDS = {"mixtral_three_of_five": 2}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {
        "mixtral": TINY,
        "mixtral_sliding_tied": TINY
        | {"sliding_window": 5, "tie_word_embeddings": True, "head_dim": 10, "hidden_act": "gelu_pytorch_tanh"},
        "mixtral_three_of_five": TINY | {"num_local_experts": 5, "num_experts_per_tok": 3},
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the published members, in the published dialect."""
    values = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.02,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    large = {"hidden_size": 6144, "intermediate_size": 16384, "num_hidden_layers": 56, "num_attention_heads": 48}
    return {"mixtral_8x7b": values, "mixtral_8x22b": values | large | {"vocab_size": 32768}}


def sizes() -> dict[str, int]:
    """{name of a published model: its published number of parameters}."""
    return {"mixtral_8x7b": 46_702_792_704, "mixtral_8x22b": 140_630_071_296}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
}

# The complete published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "mixtral-8x7b": {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "attention_dropout": 0.0, "bos_token_id": 1,
    "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size":
    14336, "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
    "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
    "tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache":
    true, "vocab_size": 32000
  }
}""")

# Fields refused at any changed value: alone they contradict other fields, or no published model has them.
REFUSED = {
    "mixtral": {"router_jitter_noise"},
}

ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")  # as in transformers 5.23

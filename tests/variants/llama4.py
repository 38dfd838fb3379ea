"""Tiny configurations of Llama 4, one per variation of its maths, and the published sizes of its text model.

24 tokens exceed two chunks, the original context and several steps of the query temperature.
"""

from typing import Any

from fnmodels import llama4
from fnmodels.ops.moe.router import RouterDtypes

# transformers computes the temperature from indices in the row instead of positions.
SEPARATE = {
    "left": "its temperature goes by the place in the row, not by position",
    "packed": "its temperature goes by the place in the row, not by position",
}

# Without effect: the width of dense layers without any, and settings of a disabled temperature.
BLIND = {name: {"intermediate_size_mlp"} for name in ("llama4", "llama4_text_all_experts")}
BLIND["llama4_text_untuned_tied"] = {"attn_scale", "floor_scale"}
BLIND["llama4_text_biased"] = {"attn_scale", "floor_scale", "attn_temperature_tuning"}

SEEDS = {"llama4_text_all_experts": 7, "llama4_text_biased": 1}

TINY: dict[str, Any] = {
    "model_type": "llama4_text",
    "vocab_size": 52,
    "hidden_size": 32,
    "intermediate_size": 20,
    "intermediate_size_mlp": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 7,
    "floor_scale": 3,
    "attn_scale": 0.3,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": False,
    # the defaults are outside of this vocabulary
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def variants() -> dict[str, Any]:
    """{name: config.json, or a Config}."""
    rope = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}  # as in Scout: no interpolation range
    scout = TINY | {
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 2,
        "num_hidden_layers": 2,
        "rope_parameters": rope,
    }
    return {
        "llama4_text": TINY,
        "llama4_text_all_experts": scout,
        "llama4_text_untuned_tied": TINY
        | {
            "num_hidden_layers": 2,
            "no_rope_layer_interval": 2,
            "attn_temperature_tuning": False,
            "use_qk_norm": False,
            "tie_word_embeddings": True,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "hidden_act": "gelu_pytorch_tanh",
        },
        # all layers rotate, since a key bias has no effect without rotary embedding
        "llama4_text_biased": TINY
        | {
            "num_hidden_layers": 2,
            "no_rope_layers": [1, 1],
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_bias": True,
        },
        "llama4": llama4.Config.from_hf({"model_type": "llama4", "text_config": scout}),
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the published members, in the published dialect."""
    text = {
        "_attn_implementation_autoset": True,
        "attention_bias": False,
        "attention_chunk_size": 8192,
        "attention_dropout": 0.0,
        "bos_token_id": 200000,
        "eos_token_id": [200001, 200007, 200008],
        "for_llm_compressor": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "interleave_moe_layer_step": 2,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "max_position_embeddings": 1048576,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_attention_heads": 40,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
        "output_router_logits": False,
        "pad_token_id": 200018,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 500000.0,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_qk_norm": False,
        "vocab_size": 202048,
    }
    rope = {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
    scout = text | {
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "cache_implementation": "hybrid",
        "floor_scale": 8192,
        "interleave_moe_layer_step": 1,
        "max_position_embeddings": 10485760,
        "moe_layers": list(range(48)),
        "no_rope_layers": [1, 1, 1, 0] * 12,
        "num_local_experts": 16,
        "rope_scaling": {**rope, "rope_type": "llama3"},
        "use_qk_norm": True,
    }
    outer = {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 200080,
        "eoi_token_index": 200081,
        "image_token_index": 200092,
        "model_type": "llama4",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "llama4_vision_model", "hidden_size": 1408},
    }
    return {"llama4_scout": {**outer, "text_config": scout}, "llama4_maverick": {**outer, "text_config": text}}


def sizes() -> dict[str, int]:
    """{name of a published member: number of parameters of its text model}; published as 109B and 400B with vision."""
    return {"llama4_scout": 107_769_861_120, "llama4_maverick": 400_711_848_960}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    # the full model minus the vision tower and its projection
    "llama-4-scout": 108_641_793_536 - 871_932_416,
    "llama-4-scout-text": 108_641_793_536 - 871_932_416,
    "llama-4-maverick": 401_583_781_376 - 871_932_416,
    "llama-4-maverick-text": 401_583_781_376 - 871_932_416,
}

# Fields refused at any changed value: alone they contradict other fields, or no published model has them.
REFUSED = {
    "llama4_text": {"rope_parameters..low_freq_factor", "router_jitter_noise"},
}

ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")  # as in transformers 5.23

NO_FILE = {"llama4_text": "published within llama4's text_config"}

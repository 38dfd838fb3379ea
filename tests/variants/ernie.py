"""Tiny configurations of ERNIE 4.5, one per variation of its maths, and its published sizes."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "ernie4_5",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e2},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_EXPERTS = {"moe_intermediate_size", "moe_norm_min", "num_experts", "num_experts_per_tok", "num_shared_experts"}
BLIND = {"ernie4_5": _EXPERTS, "ernie4_5_bias_untied": _EXPERTS, "ernie4_5_moe": {"use_bias", "moe_norm_min"}}
BLIND |= {"ernie4_5_moe_plain": {"use_bias"}}
REFUSED = {"ernie4_5_moe": {"use_bias"}}  # would also bias the head; no published model has it
ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="model")  # as in transformers 5.23


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}; in the last one the chosen weights often sum to less than moe_norm_min."""
    biased = {"use_bias": True, "tie_word_embeddings": False, "head_dim": 8, "hidden_act": "gelu_pytorch_tanh"}
    sparse = TINY | {"model_type": "ernie4_5_moe", "moe_intermediate_size": 12, "moe_num_experts": 6, "moe_k": 2}
    every = {"moe_layer_interval": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 2, "moe_norm_min": 0.6}
    plain = {"moe_num_shared_experts": 0, "head_dim": 12, "tie_word_embeddings": False, "num_hidden_layers": 4}
    return {
        "ernie4_5": TINY | {"head_dim": 12},
        "ernie4_5_bias_untied": TINY | biased,
        "ernie4_5_moe": sparse | {"moe_num_shared_experts": 2, "moe_layer_start_index": 1},
        "ernie4_5_moe_plain": sparse | every | plain,
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models of both types, in the published dialect."""
    common = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "hidden_act": "silu", "rms_norm_eps": 1e-5}
    common |= {"rope_theta": 500000.0, "max_position_embeddings": 131072, "vocab_size": 103424, "use_bias": False}
    common |= {"torch_dtype": "bfloat16", "use_cache": True}
    return {
        "ernie_4_5_0_3b": common
        | {
            "architectures": ["Ernie4_5ForCausalLM"],
            "head_dim": 128,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "model_type": "ernie4_5",
            "num_attention_heads": 16,
            "num_hidden_layers": 18,
            "num_key_value_heads": 2,
            "rope_scaling": None,
            "tie_word_embeddings": True,
        },
        "ernie_4_5_300b_a47b": common
        | {
            "architectures": ["Ernie4_5_MoeForCausalLM"],
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "model_type": "ernie4_5_moe",
            "moe_capacity": [64, 64, 64],
            "moe_gate": "topk",
            "moe_intermediate_size": 3584,
            "moe_k": 8,
            "moe_layer_end_index": 53,
            "moe_layer_interval": 1,
            "moe_layer_start_index": 3,
            "moe_num_experts": 64,
            "moe_num_shared_experts": 0,
            "moe_use_aux_free": True,
            "num_attention_heads": 64,
            "num_hidden_layers": 54,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published model: number of parameters}; published as 0.36B and 300B, counted by hand."""
    return {"ernie_4_5_0_3b": 360_748_032, "ernie_4_5_300b_a47b": 299_484_163_264}


# Without the MTP block of 21B.
TOTALS: dict[str, int | str] = {
    "ernie-4.5-0.3b": 360_748_032,
    "ernie-4.5-21b-a3b": 21_825_437_888,
    "ernie-4.5-300b-a47b": 299_484_163_264,
}

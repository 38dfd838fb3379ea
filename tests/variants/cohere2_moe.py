"""Tiny configurations of Cohere 2 with experts, one per variation of their maths, and the size of the defaults."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "cohere2_moe",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_shared_experts": 2,
    "prefix_dense_intermediate_size": 28,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "sliding_window": 5,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-2,
    "logit_scale": 0.7,
    "rope_theta": 50.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    sums = {"shared_expert_combination_strategy": "sum", "expert_selection_fn": "sigmoid", "attention_bias": True}
    sums |= {"rms_norm_eps": 1e-2, "tie_word_embeddings": False, "prefix_dense_sliding_window_pattern": 2}
    sums |= {"layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["sparse", "dense"]}
    return {"cohere2_moe": TINY, "cohere2_moe_sigmoid": TINY | sums | {"num_hidden_layers": 2}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the defaults of transformers."""
    sizes = {"vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    return {"cohere2_moe": {"architectures": ["Cohere2MoeForCausalLM"], "model_type": "cohere2_moe"} | sizes | heads}


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes."""
    D = 8192
    layer = D + 2 * D * 64 * 128 + 2 * D * 8 * 128 + 8 * 3 * D * 22528 + 8 * D
    return {"cohere2_moe": 256000 * D + D + 40 * layer}


ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")  # as in transformers 5.24
BLIND = {"cohere2_moe": {"norm_topk_prob"}, "cohere2_moe_sigmoid": {"layer_norm_eps"}}

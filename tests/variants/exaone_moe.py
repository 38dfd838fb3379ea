"""Tiny configurations of K-EXAONE and Hy3, one per variation of their maths, and their sizes."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "exaone_moe",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "moe_intermediate_size": 20,
    "num_experts": 6,
    "num_shared_experts": 1,
    "num_experts_per_tok": 2,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_nextn_predict_layers": 0,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    exaone = {"n_group": 3, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 1.6}
    exaone |= {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 5}
    hy = {"model_type": "hy_v3", "router_scaling_factor": 1.7, "attention_bias": True, "num_hidden_layers": 2}
    return {"exaone_moe": TINY | exaone, "hy_v3": TINY | hy | {"mlp_layer_types": ["sparse", "dense"]}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of published models, by the defaults of transformers and what the publisher says."""
    exaone: dict[str, Any] = {
        "architectures": ["ExaoneMoEForCausalLM"],
        "model_type": "exaone_moe",
        "vocab_size": 153600,
        "hidden_size": 6144,
        "intermediate_size": 18432,
        "num_hidden_layers": 48,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "moe_intermediate_size": 2048,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "sliding_window": 128,
        "sliding_window_pattern": "LLLG",
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 12,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
        "tie_word_embeddings": False,
    }
    hy: dict[str, Any] = {
        "architectures": ["HYV3ForCausalLM"],
        "model_type": "hy_v3",
        "vocab_size": 120832,
        "hidden_size": 4096,
        "intermediate_size": 13312,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "moe_intermediate_size": 1536,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "router_scaling_factor": 2.826,
        "enable_moe_fp32_combine": True,
        "max_position_embeddings": 131072,
    }
    return {"k_exaone_236b": exaone, "hy3_preview": hy}


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes; published as 236B and 295B.

    K-EXAONE has an MTP head: a projection, three norms, attention and an MLP.
    """
    D = 6144
    head = 2 * D * D + 3 * D + (2 * D * 64 * 128 + 2 * D * 8 * 128 + 2 * 128 + 2 * D) + 3 * D * 18432
    exaone = _size(153600, D, 18432, 48, 2048, 128) + head
    return {"k_exaone_236b": exaone, "hy3_preview": _size(120832, 4096, 13312, 80, 1536, 192)}


def _size(vocab: int, width: int, dense: int, layers: int, inner: int, experts: int) -> int:
    attention = 2 * width * 64 * 128 + 2 * width * 8 * 128 + 2 * 128 + 2 * width
    sparse = (experts + 1) * 3 * width * inner + experts * width + experts
    return 2 * vocab * width + width + layers * attention + 3 * width * dense + (layers - 1) * sparse


ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")  # as in transformers 5.24
REFUSED = {"hy_v3": {"mlp_bias", "num_hidden_layers"}}
SEEDS = {"exaone_moe": 5}

TOTALS: dict[str, int | str] = {"k-exaone-236b-a23b": 236_571_156_352 + 528_513_280, "hy3-preview": "295B"}

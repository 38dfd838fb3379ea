"""Tiny configurations of A.X K2, one per way in which its maths can differ, and its published sizes."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
SEEDS = {"axk2": 1, "axk2_light": 3}
REFUSED = {"axk2": {"head_dim", "num_attention_heads"}}

TINY: dict[str, Any] = {
    "model_type": "axk2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "index_n_heads": 11,  # fewer give keys that no head scores, which are ranked otherwise there
    "index_head_dim": 11,
    "index_topk": 8,
    "gated_norm_rank": 5,
    "moe_intermediate_size": 12,
    "n_routed_experts": 9,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "mlp_layer_types": ["dense", "sparse"],
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5}
YARN |= {"original_max_position_embeddings": 16, "mscale": 1.3, "mscale_all_dim": 0.7}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    light = {"attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": False, "n_shared_experts": 1}
    light |= {"n_group": None, "topk_group": None, "n_routed_experts": 8, "rope_parameters": YARN}
    return {"axk2": TINY, "axk2_light": TINY | light | {"mlp_layer_types": ["sparse", "dense"]}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of A.X K2 Light: the defaults of transformers 5.24."""
    return {"ax_k2_light": {"model_type": "axk2", "architectures": ["AXK2ForCausalLM"]}}


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted from the shapes."""
    D, heads, gate = 2048, 32, 2 * 16 * 2048
    attention = 384 * D + 384 + heads * 160 * 768 + (128 + 32) * D + 128 + heads * 128 * 128 + heads * 64 * D
    indexer = 16 * 128 * 384 + 128 * D + 2 * 128 + 16 * D
    each = attention + indexer + 2 * D + gate
    experts = gate + 129 * 3 * D * 512 + 128 * D + 128
    return {"ax_k2_light": 2 * 163840 * D + D + 48 * each + 3 * D * 5120 + 47 * experts}


TOTALS: dict[str, int | str] = {"ax-k2-light": sizes()["ax_k2_light"]}
NO_FILE = {"axk2": "no copy is at hand; one that transformers writes is read in test_release_configs.py"}

"""Tiny configurations of Mistral Large 4's text, one per way in which its maths can differ, and its published sizes."""

from typing import Any

from fnmodels.models.decoder import mistral_large4
from fnmodels.ops.moe.router import RouterDtypes

# Alone they contradict other fields.
REFUSED = {"mistral_large4_text": {"head_dim", "n_group", "num_attention_heads"}}
SEEDS = {"mistral_large4": 1}
ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")

TINY: dict[str, Any] = {
    "model_type": "mistral_large4_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "index_n_heads": 17,  # fewer give keys that no head scores, which are ranked otherwise there
    "index_head_dim": 11,
    "index_topk": 8,
    "indexer_types": ["full", "shared", "full", "shared"],
    # without rope an indexer ranks equal beginnings of a document by rounding, on which no layer with rope may depend
    "no_rope_layers": [1, 0, 1, 0],
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    "n_routed_experts": 9,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 64,
    "rms_norm_eps": 2e-1,  # with less fp32 gradients are off by more than 1e-5
    "final_logit_softcapping": 5.0,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5}
YARN |= {"original_max_position_embeddings": 16, "attention_factor": 1.0}


def variants() -> dict[str, Any]:
    """{name: config.json or Config}."""
    more = {"attention_bias": True, "tie_word_embeddings": True, "n_shared_experts": 1, "rope_parameters": YARN}
    more |= {"n_group": 1, "topk_group": 1, "n_routed_experts": 8, "num_hidden_layers": 2, "no_rope_layers": [0, 1]}
    more |= {"indexer_types": ["full", "full"], "mlp_layer_types": ["sparse", "sparse"], "hidden_act": "gelu"}
    text = {name: value for name, value in TINY.items() if name != "model_type"}
    wrapped = mistral_large4.Config.from_hf({"model_type": "mistral_large4", "text_config": text})
    return {"mistral_large4": TINY, "mistral_large4_bias_tied": TINY | more, "mistral_large4_wrapped": wrapped}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the text with the defaults of transformers 5.24."""
    return {"mistral_large_4": {"model_type": "mistral_large4_text"}}


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted from the shapes."""
    D, heads, inner = 6144, 64, 6144
    attention = heads * 128 * D + 512 * D + 512 + heads * 128 * D + 2 * heads
    rotates, still = 64 * D + heads * 192 * 512, heads * 256 * 512
    indexer = 32 * 128 * D + 128 * D + 2 * 128 + 32 * D + 2 * D + 2 * 32
    each = attention + indexer + 2 * D
    experts = 129 * 3 * D * inner + 128 * D
    ends = 2 * 204800 * D + D + 32 + 3 * D * 24576
    return {"mistral_large_4": ends + 72 * each + 54 * rotates + 18 * still + 71 * experts}


_WHOLE = {"rope.partial"}  # all dimensions rotate
BLIND = {"mistral_large4": _WHOLE, "mistral_large4_wrapped": _WHOLE}
BLIND |= {"mistral_large4_bias_tied": {*_WHOLE, "intermediate_size"}}
TOTALS: dict[str, int | str] = {"mistral-large-4-1t": sizes()["mistral_large_4"]}
NO_FILE = {"mistral_large4_text": "published within mistral_large4's text_config"}
NO_FILE |= {"mistral_large4": 'its text is read, with part="text"; the images are not'}

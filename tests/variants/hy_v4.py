"""Tiny configurations of Hy4, one per way in which its maths can differ, and its published sizes."""

import re
from typing import Any

from torch import Tensor

from fnmodels.models.decoder.hy_v4 import TRAITS
from fnmodels.ops.moe.router import RouterDtypes

ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")
SEEDS = {"hy_v4": 2, "hy_v4_light": 1, "hy_v4_vl_text": 9}
REFUSED = {"hy_v4": {"head_dim"}, "hy_v4_vl_text": {"head_dim"}}
WIDE_LOGITS = {"hy_v4", "hy_v4_vl_text"}

# 16 index heads: a score is 0 where no head looks, and ties at the edge of the choice have no order in the reference.
TINY: dict[str, Any] = {
    "model_type": "hy_v4",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "index_n_heads": 16,
    "index_head_dim": 11,
    "index_topk": 8,
    "indexer_types": ["full", "full", "shared"],
    "moe_intermediate_size": 12,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "swiglu_limit": 0.9,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "hc_mult": 3,
    "hc_magnitude": 1.6,
    "hc_eps": 1e-2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_interleave": False,  # transformers rotates halves whatever the file says, unlike the published model
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}
# The text of Hy4 with images, whose neighbours rotate there too.
IMAGES: dict[str, Any] = TINY | {"model_type": "hy_v4_vl_text"}
IMAGES["rope_parameters"] = TINY["rope_parameters"] | {"mrope_section": [2, 1, 1]}
del IMAGES["rope_interleave"]
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5}
YARN |= {"original_max_position_embeddings": 16, "mscale": 1.3, "mscale_all_dim": 0.7}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    light = {"attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": False, "n_shared_experts": 1}
    light |= {"n_group": 1, "topk_group": 1, "n_routed_experts": 8, "rope_parameters": YARN, "hc_mult": 2}
    light |= {"hidden_act": "gelu", "num_hidden_layers": 2, "indexer_types": ["full", "shared"]}
    light |= {"mlp_layer_types": ["sparse", "dense"]}
    return {"hy_v4": TINY, "hy_v4_light": TINY | light, "hy_v4_vl_text": IMAGES}


# Fields that are known of the published file, which states 8 heads of keys that nothing reads.
_PREVIEW: dict[str, Any] = {
    "architectures": ["HYV4ForCausalLM"],
    "model_type": "hy_v4",
    "vocab_size": 120832,
    "hidden_size": 6144,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "head_dim": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "gated_mla": True,
    "gating_type": "elementwise",
    "learnable_sink": True,
    "learnable_sink_init": 0.0,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "indexer_types": ["full", *["full", "shared", "shared", "shared"] * 19, "full"],
    "mlp_layer_types": ["dense", *["sparse"] * 77],
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "swiglu_limit": 10.0,
    "enable_ihc": True,
    "hc_mult": 4,
    "hc_magnitude": 2.0,
    "hc_eps": 1e-06,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"},
    "max_position_embeddings": 1048576,
}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the published sizes; the text with images has them by default."""
    return {"hy4_preview": _PREVIEW, "hy4_text": {"model_type": "hy_v4_vl_text"}}


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted from the shapes; the preview's file counts an MTP head."""
    D, heads, streams = 6144, 64, 4
    attention = 2048 * D + 2048 + heads * 256 * 2048 + (512 + 64) * D + 512 + heads * (192 + 256) * 512
    attention += 2 * heads * 256 * D + heads
    indexer = 32 * 128 * 2048 + 128 * D + 2 * 128 + 32 * D
    joined = 2 * streams * streams * D + 2 * streams + 2
    experts = 257 * 3 * D * 2048 + 256 * D + 256
    total = 2 * 120832 * D + D + 78 * (attention + 2 * joined + 2 * D) + 21 * indexer + 3 * D * 18432 + 77 * experts
    total += streams * streams * D + streams + 1
    head = 2 * D * D + 5 * D + attention + indexer + experts
    return {"hy4_preview": total + head, "hy4_text": total}


TOTALS: dict[str, int | str] = {"hy4-preview": sizes()["hy4_text"]}  # published as 770B, which is rounded up
NO_FILE = {"hy_v4": "no copy is at hand; one that transformers writes is read in test_release_configs.py"}
NO_FILE |= {"hy_v4_vl_text": "published within hy_v4_vl's text_config"}


def as_published(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Under Tencent's names, some of which transformers 5.24 does not write."""
    return {_published(name): tensor for name, tensor in tensors.items()}


def _published(name: str) -> str:
    return next((re.sub(p, new, name) for p, new in TRAITS.resaved.items() if re.fullmatch(p, name)), name)

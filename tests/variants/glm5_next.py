"""Tiny configurations of GLM 5.3 Flash's text, one per way in which its maths can differ, and its published sizes."""

from typing import Any

from fnmodels.models.decoder import glm5_next
from fnmodels.ops.moe.router import RouterDtypes

ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")
SEPARATE = {"packed": "convolutions, states and pools run on from one document into the next"}
# Where the tail is not selected, the first queries see no key, and transformers attends to all, later ones too.
REFUSED = {"glm5_next_text": {"index_kpool_always_select_tail"}}

# 16 index heads: a score is 0 where no head looks, and ties at the edge of the choice have no order in the reference.
TINY: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 0,
    "v_head_dim": 7,
    "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    "index_n_heads": 16,
    "index_head_dim": 11,
    "index_topk": 8,
    "index_kpool": 2,
    "indexer_types": ["full", "full", "shared"],
    "linear_num_heads": 2,
    "linear_head_dim": 10,
    "linear_lower_bound": -3.0,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "swiglu_limit": 0.9,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-2,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 64,
    "rms_norm_eps": 5e-2,  # with 1e-2 logits of 140 tokens are off by 3e-5 in fp32
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, Any]:
    """{name: config.json or Config}."""
    more = {"attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": False, "n_shared_experts": 1}
    more |= {"n_group": 3, "topk_group": 1, "linear_lower_bound": None, "linear_conv_kernel_dim": 3, "hc_mult": 2}
    more |= {"hidden_act": "gelu"}
    more |= {"layer_types": ["indexed_attention", "linear_attention"], "indexer_types": ["full", "full"]}
    more |= {"num_hidden_layers": 2, "mlp_layer_types": ["sparse", "dense"], "index_kpool": 3, "hc_sinkhorn_iters": 1}
    more |= {"index_topk": 6}
    text = {name: value for name, value in TINY.items() if name != "model_type"}
    wrapped = glm5_next.Config.from_hf({"model_type": "glm5_next", "text_config": text})
    return {"glm5_next": TINY, "glm5_next_groups_tied": TINY | more, "glm5_next_wrapped": wrapped}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json}: the text of the published file, with the fields that other programs read of it."""
    layers = [i % 4 == 3 for i in range(45)]
    delta = {"num_heads": 64, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0}
    delta |= {"kda_layers": [i for i in range(45) if not layers[i]]}
    delta |= {"full_attn_layers": [i for i in range(45) if layers[i]]}
    sizes = {"vocab_size": 154880, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 2048}
    sizes |= {"num_hidden_layers": 45, "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 0}
    latent = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0}
    latent |= {"qk_head_dim": 256, "v_head_dim": 256, "mla_use_nope": True, "attention_bias": False}
    indexer: dict[str, Any] = {"index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "index_kpool": 4}
    indexer |= {"index_kpool_compress": True, "index_kpool_always_select_tail": True, "indexer_rope_interleave": True}
    indexer |= {"index_share_for_mtp_iteration": True, "indexer_types": ["full"] * 45}
    experts: dict[str, Any] = {"n_routed_experts": 288, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1}
    experts |= {"topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3}
    experts |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_router_dtype": "float32"}
    rest: dict[str, Any] = {"mhc": True, "hc_mult": 4, "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "swiglu_limit": 10.0}
    rest |= {"layer_types": ["deepseek_sparse_attention" if one else "linear_attention" for one in layers]}
    rest |= {"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42, "num_nextn_predict_layers": 1}
    rest |= {"linear_attn_config": delta, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576}
    return {"glm_5_3_flash": {"model_type": "glm5_next_text"} | sizes | latent | indexer | experts | rest}


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted from the shapes."""
    D, heads, n = 4096, 64, 4
    linear = 4 * D * 8192 + D * heads + 2 * (128 * D + 8192 * 128) + 3 * 8192 * 4 + 8192 + heads + 128
    latent = 1536 * D + 1536 + heads * 256 * 1536 + 512 * D + 512 + heads * 512 * 512 + heads * 256 * D
    indexer = 32 * 128 * 1536 + 2 * 128 * D + 2 * 128 + 32 * D + 4 * 128
    joined = (2 + n) * n * (n * D + 1) + 3
    experts = 289 * 3 * D * 2048 + 288 * D + 288
    each = 45 * (2 * joined + 2 * D) + 34 * linear + 11 * (latent + indexer)
    head = 2 * D * D + 3 * D + 2 * D + latent + indexer + experts
    return {"glm_5_3_flash": 2 * 154880 * D + D + each + 3 * 3 * D * 12288 + 42 * experts + head}


TOTALS: dict[str, int | str] = {"glm-5.3-flash": sizes()["glm_5_3_flash"]}  # published as 320B
NO_FILE = {
    "glm5_next_text": "published within glm5_next's text_config",
    "glm5_next": "no copy is at hand; one that transformers writes is read in test_release_configs.py",
}

"""Tiny configurations of MiniMax M3's text, one per way in which its maths can differ, and its published sizes."""

from typing import Any

from fnmodels.models.decoder import minimax_m3
from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "minimax_m3_vl_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 12,
    "dense_intermediate_size": 44,
    "shared_intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "index_n_heads": 2,
    "index_head_dim": 10,
    "index_block_size": 3,
    "index_topk_blocks": 3,
    "index_local_blocks": 1,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "dense"],
    "swiglu_alpha": 1.3,
    "swiglu_limit": 1.1,
    "max_position_embeddings": 64,
    "rotary_dim": 4,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Of one value: those that restate another field, and noise in training, which no published model has.
REFUSED = {
    "minimax_m3_vl_text": {
        *("hidden_act", "index_n_heads", "num_key_value_heads", "rotary_dim", "router_jitter_noise"),
        "rope_parameters..partial_rotary_factor",
    }
}
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")
SEPARATE = {
    "packed": "blocks, and the keys in them that a query sees, are counted along the row",
    "left": "blocks are counted from the padding",
}
BLIND = {"minimax_m3_local_tied": {"dense_intermediate_size"}}
NO_FILE = {"minimax_m3_vl_text": "published within minimax_m3_vl's text_config"}
NO_FILE |= {"minimax_m3_vl": 'its text is read, with part="text"; the images are not'}


def variants() -> dict[str, Any]:
    """{name: config.json or Config}; two local blocks, and more of experts, in the second."""
    more = {"index_local_blocks": 2, "layer_types": ["minimax_m3_sparse"] * 2}
    more |= {"num_hidden_layers": 2, "mlp_layer_types": ["sparse"] * 2, "tie_word_embeddings": True}
    text = {name: value for name, value in TINY.items() if name != "model_type"}
    wrapped = minimax_m3.Config.from_hf({"model_type": "minimax_m3_vl", "text_config": text})
    return {"minimax_m3": TINY, "minimax_m3_local_tied": TINY | more, "minimax_m3_wrapped": wrapped}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the text of M3, as published but for its tower."""
    return {"minimax_m3": _PUBLISHED}


def sizes() -> dict[str, int]:
    """{name: number of parameters} of the text; with 865,567,232 of the tower and projector, 427,040,140,160.

    With the MTP head: a projection, norms, attention, the indexer, experts and a shared one.
    """
    D, H = 6144, 128
    head = 2 * D * D + 5 * D + 2 * D * 64 * H + 2 * D * 4 * H + 2 * H + 5 * H * D + 2 * H
    return {"minimax_m3": TOTALS["minimax-m3"] + head + 129 * 3 * D * 3072 + 128 * D + 128}


_SPARSE = [0] * 3 + [1] * 57
_PUBLISHED: dict[str, Any] = {
    "model_type": "minimax_m3_vl",
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "image_token_index": 200025,
    "video_token_index": 200026,
    "projector_hidden_size": 6144,
    "text_config": {
        "attention_output_gate": False,
        "dense_intermediate_size": 12288,
        "head_dim": 128,
        "hidden_act": "swigluoai",
        "hidden_size": 6144,
        "intermediate_size": 3072,
        "max_position_embeddings": 1048576,
        "moe_layer_freq": _SPARSE,
        "n_shared_experts": 1,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 4,
        "num_local_experts": 128,
        "num_mtp_modules": 7,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5,
        "qk_norm_type": "per_head",
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000,
        "rotary_dim": 64,
        "routed_scaling_factor": 2.0,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 3072,
        "sparse_attention_config": {
            "sparse_attention_freq": _SPARSE,
            "sparse_block_size": 128,
            "sparse_disable_index_value": _SPARSE,
            "sparse_index_dim": 128,
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_num_index_heads": 4,
            "sparse_score_type": "max",
            "sparse_topk_blocks": 16,
            "use_sparse_attention": True,
        },
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "use_gemma_norm": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
        "vocab_size": 200064,
    },
}
TOTALS: dict[str, Any] = {"minimax-m3": 426_174_572_928}

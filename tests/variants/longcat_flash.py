"""Tiny configurations of LongCat-Flash, one per way in which its maths can differ, and its published sizes."""

import re
from typing import Any

from torch import Tensor

from fnmodels import longcat_flash
from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "longcat_flash",
    "vocab_size": 61,
    "hidden_size": 32,
    "ffn_hidden_size": 44,
    "num_layers": 2,
    "num_attention_heads": 4,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 7,
    "expert_ffn_hidden_size": 12,
    "n_routed_experts": 6,
    "zero_expert_num": 3,
    "moe_topk": 3,
    "routed_scaling_factor": 1.7,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    "tie_word_embeddings": False,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SEEDS = {"longcat_flash": 25}
BLIND = {name: {"ngram_heads", "ngram_ratio"} for name in ("longcat_flash", "longcat_flash_biases")}  # no n-grams
REFUSED = {"longcat_flash": {"head_dim"}}  # follows from qk_rope_head_dim
# transformers' module has weights of experts that return their input, which no published file has, and so reads none.
UNREADABLE = dict.fromkeys(("longcat_flash", "longcat_flash_biases"), "weights of experts without any")
ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")


NGRAM = TINY | {"model_type": "longcat_flash_ngram", "num_layers": 1, "emb_neighbor_num": 3, "emb_split_num": 2}
NGRAM |= {"ngram_vocab_size_ratio": 2.5, "eos_token_id": 7}


def variants() -> dict[str, Any]:
    """{name: config.json, or the Config of a model type that transformers does not have}."""
    return {
        "longcat_flash": TINY,
        "longcat_flash_biases": TINY | {"num_layers": 1, "attention_bias": True, "hidden_act": "gelu_pytorch_tanh"},
        "longcat_flash_ngram": longcat_flash.Config.from_hf(NGRAM),
    }


def as_published(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Without the unused weights of experts that return their input, which transformers' module has."""
    unused = re.compile(r"\.experts\.(\d+)\.(gate|up)_proj\.weight$")

    def is_read(name: str) -> bool:
        found = unused.search(name)
        return found is None or int(found[1]) < config.n_routed_experts

    return {name: value for name, value in tensors.items() if is_read(name)}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} as it is published, with every field."""
    return {
        "longcat_flash_chat": {
            "architectures": ["LongcatFlashForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "vocab_size": 131072,
            "hidden_size": 6144,
            "ffn_hidden_size": 12288,
            "expert_ffn_hidden_size": 2048,
            "num_layers": 28,
            "num_attention_heads": 64,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "routed_scaling_factor": 6.0,
            "n_routed_experts": 512,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "use_cache": True,
            "rope_theta": 10000000.0,
            "attention_method": "MLA",
            "zero_expert_num": 256,
            "zero_expert_type": "identity",
            "moe_topk": 12,
            "model_type": "longcat_flash",
        }
    }


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes; published as 560B, with the MTP head beside it."""
    D, heads = 6144, 64
    attention = D * 1536 + 1536 + 1536 * heads * 192 + D * 576 + 512 + 512 * heads * 256 + heads * 128 * D
    half = attention + 2 * D + 3 * D * 12288
    experts = 512 * 3 * D * 2048 + 768 * D + 768
    return {"longcat_flash_chat": 2 * 131072 * D + D + 28 * (2 * half + experts) + 2 * D * D + 3 * D + half}


NO_FILE = {"longcat_flash_ngram": "no copy is at hand; its preset has the published sizes"}
TOTALS: dict[str, int | str] = {"longcat-flash": "561B", "longcat-flash-lite": "68.5B"}

"""Tiny configurations of Qwen 3.8 Flash Next's text, one per way in which its maths can differ."""

from typing import Any

from torch import Tensor

from fnmodels.models.decoder import qwen4_exp
from fnmodels.ops.moe.router import RouterDtypes

SEPARATE = {"packed": "the convolution and the state run on from one document into the next"}
SEEDS = {"qwen4_exp": 1, "qwen4_exp_bias_tied": 1, "qwen4_exp_ngrams": 6}
_OF_NGRAMS = {"heads", "rows", "multiple", "width", "taps", "seed", "end"}
_WITHOUT = ("qwen4_exp", "qwen4_exp_bias_tied", "qwen4_exp_wrapped")
BLIND = {name: {f"ngram_{field}" for field in _OF_NGRAMS} for name in _WITHOUT}
# of the hash, whose numbers follow from the config
_BUFFERS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
LEFT_OUT = {"qwen4_exp_text": _BUFFERS, "qwen4_exp": _BUFFERS}
TRAINING_TOLERANCE = {"qwen4_exp_ngrams": 1e-11}  # of fp64: the square root of a gate is steep near 0
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")

TINY: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 14,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "hc_count": 3,
    "hc_lowrank": 9,
    "indexer_n_heads": 5,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 18,
    "indexer_budget": 9,
    "indexer_compress_ratio": 3,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.5},
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": False,
    "layer_types": ["linear_attention", "indexed_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


NGRAMS = {
    "ple_layer_ids": [1, 2],
    "ple_embed_dim": 24,
    "ple_conv_kernel_size": 3,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 11,
    "make_ngram_vocab_size_divisible_by": 80,
    "seed": 9,
    "split_ngram_parts": 3,
    "indexer_n_heads": 11,  # with fewer, two blocks without a positive score may tie
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "indexed_attention"],
}


def variants() -> dict[str, Any]:
    """{name: config.json or Config}."""
    more = {"norm_topk_prob": False, "attention_bias": True, "linear_conv_kernel_dim": 3, "output_gate_type": "sigmoid"}
    more |= {"layer_types": ["indexed_attention", "linear_attention"], "hc_count": 2, "tie_word_embeddings": True}
    text = {name: value for name, value in TINY.items() if name != "model_type"}
    wrapped = qwen4_exp.Config.from_hf({"model_type": "qwen4_exp", "text_config": text})
    return {"qwen4_exp": TINY, "qwen4_exp_bias_tied": TINY | more, "qwen4_exp_wrapped": wrapped} | {
        "qwen4_exp_ngrams": TINY | NGRAMS
    }


def as_published(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Without the numbers of the hash, which a file may lack."""
    return {name: value for name, value in tensors.items() if not name.endswith(_BUFFERS)}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json}: the defaults of transformers 5.24 and choices of keys; no published sizes are known."""
    indexer = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_budget": 2048}
    indexer |= {"indexer_compress_ratio": 4, "architectures": ["Qwen4ExpForCausalLM"]}
    sizes: dict[str, Any] = {
        "vocab_size": 248320,
        "hidden_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
    }
    sizes |= {
        "num_attention_heads": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    }
    return {"qwen4_exp_defaults": {"model_type": "qwen4_exp_text", "num_key_value_heads": 2} | sizes | indexer}


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted from the shapes."""
    D, V, n, rank = 2048, 248320, 4, 320
    mixer = n * D + 2 * rank * n * D
    linear = D * (2 * 2048 + 4096) + 4 * 8192 + 4096 * D + 2 * 32 * D + 2 * 32 + 128 + 4096 * D
    full = D * (2 * 4096 + 2 * 512) + 4096 * D + 2 * 256 + D * 17 * 128 + 2 * 128
    experts = 512 * 3 * D * 512 + 512 * D + 3 * D * 512 + D
    each = 2 * (mixer + n * n * D) + experts
    return {"qwen4_exp_defaults": 2 * V * D + 40 * each + 30 * linear + 10 * full + mixer}


NO_FILE = {
    "qwen4_exp_text": "published within qwen4_exp's text_config",
    "qwen4_exp": "no copy is at hand; one that transformers writes is read in test_release_configs.py",
}

"""Tiny configurations of DeepSeek V4.1's text, one per way in which its maths can differ, and its published sizes.

transformers has no code of it: tests/fnmodels/models/test_deepseek_v41.py compares with a written-out reference.
"""

from typing import Any

from fnmodels.models.decoder import deepseek_v41
from fnmodels.ops.moe.router import RouterDtypes

ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")

# 16 index heads: a score is 0 where no head looks, and choices of equal scores are unclear.
TEXT: dict[str, Any] = {
    "model_type": "deepseek_v41_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "moe_intermediate_size": 10,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "qk_rope_head_dim": 6,
    "q_lora_rank": 14,
    "o_lora_rank": 6,
    "o_groups": 2,
    "sliding_window": 5,
    "compress_ratios": [0, 2, 2, 1, 1, 1],
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 2,
    "candidate_block_size": 2,
    "index_n_heads": 16,
    "index_head_dim": 14,
    "index_topk": 3,
    "engram_layer_ids": [1, 3],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_head_dim": 5,
    "engram_vocab_size": 20,
    "engram_compressed_vocab_size": 40,
    "engram_pad_token_id": 2,
    "engram_num_embeddings": [120, 184],
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 1.7,
    "swiglu_limit": 0.9,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 3,
    "hc_eps": 1e-3,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 64,
    "rope_theta": 50.0,
    "compress_rope_theta": 90.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY: dict[str, Any] = {"model_type": "deepseek_v41", "text_config": TEXT}
# The last two layers reuse a choice among windows of two tokens; no tables, no candidates, the text alone.
_KINDS = {"compress_ratios": [2, 2, 2, 2], "kv_source_layer_ids": [0], "index_source_layer_ids": [0, 1]}
PLAIN = {name: value for name, value in TEXT.items() if not name.startswith(("engram", "candidate"))}
PLAIN |= _KINDS | {"num_hidden_layers": 4, "n_shared_experts": 2, "hc_mult": 2}


def variants() -> dict[str, Any]:
    """{name: Config}: transformers does not read these files."""
    files = {"deepseek_v41": TINY, "deepseek_v41_plain": PLAIN}
    return {name: deepseek_v41.Config.from_hf(values) for name, values in files.items()}

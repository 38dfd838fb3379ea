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
    "compress_ratios": [0, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [1, 2],
    "index_source_layer_ids": [1, 2, 4],
    "candidate_source_layer_id": 2,
    "candidate_topk_blocks": 2,
    "candidate_block_size": 2,
    "index_n_heads": 16,
    "index_head_dim": 14,
    "index_topk": 3,
    "engram_layer_ids": [1, 2],
    "engram_max_ngram_size": 3,
    "engram_n_heads": 2,
    "engram_head_dim": 5,
    "engram_vocab_size": 23,
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


# other rows of a head are others of a table, or none; no tables, no candidates and no sliding layer
BLIND = {
    "deepseek_v41": {"ngram_rows"},
    "deepseek_v41_plain": {
        *("candidate_blocks", "candidate_size", "local_rope.partial", "local_rope.theta"),
        *("ngram_head_dim", "ngram_heads", "ngram_ids", "ngram_padding", "ngram_rows"),
    },
}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} as it is published, with every field."""
    return {"deepseek_v41_flash": FILES["deepseek-v4.1-flash"]}


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted from the shapes of the published tensors without tower and drafting heads.

    The compressed ids of tokens, which files lack, are two more rows of the vocabulary.
    """
    D, H, latent, streams = 5120, 512, 1280, 4 * 5120
    attention = latent * D + latent + 64 * H * latent + H * D + H + 64 + 8 * 1024 * 4096 + D * 8 * 1024
    experts = 385 * 3 * 2304 * D + 384 * (D + 1)
    each = attention + experts + 2 * D + 2 * (24 * streams + 24 + 3)
    chooses = 32 * 128 * latent + 32 * D
    makes = H * D + H + 128 * H + 128
    tables = (384006168 + 384016682) * 256 + 2 * (5 * D * 24 * 256 + 2 * streams + 129280)
    return {"deepseek_v41_flash": 2 * 129280 * D + D + 40 * each + 8 * chooses + 4 * makes + 3 * H * D + tables}


TOTALS: dict[str, int | str] = {"deepseek-v4.1-flash": sizes()["deepseek_v41_flash"]}

# Every field of the published file.
FILES: dict[str, dict[str, Any]] = {
    "deepseek-v4.1-flash": {
        "architectures": ["DeepseekV41ForCausalLM"],
        "bos_token_id": 0,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "image_token_id": 129264,
        "model_type": "deepseek_v41",
        "pad_token_id": 2,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "expert_dtype": "fp4",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [32, 32],
        },
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "candidate_block_size": 8,
            "candidate_source_layer_id": 20,
            "candidate_topk_blocks": 2048,
            "compress_ratios": [0, 0, *[2] * 18, *[1] * 20, 0, 0, 0],
            "compress_rope_theta": 160000,
            "dspark_block_size": 5,
            "dspark_markov_rank": 256,
            "dspark_n_routed_experts": 128,
            "dspark_noise_token_id": 128799,
            "dspark_num_experts_per_tok": 3,
            "dspark_target_layer_ids": [37, 38, 39],
            "engram_compressed_vocab_size": 99092,
            "engram_head_dim": 256,
            "engram_layer_ids": [1, 14],
            "engram_max_ngram_size": 4,
            "engram_n_heads": 8,
            "engram_num_embeddings": [384006168, 384016682],
            "engram_pad_token_id": 2,
            "engram_vocab_size": 16000000,
            "hc_eps": 1e-06,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "head_dim": 512,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "index_head_dim": 128,
            "index_n_heads": 32,
            "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
            "index_topk": 512,
            "initializer_range": 0.02,
            "kv_source_layer_ids": [2, 8, 14, 20],
            "max_position_embeddings": 1048576,
            "model_type": "deepseek_v41_text",
            "moe_intermediate_size": 2304,
            "n_routed_experts": 384,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 64,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 40,
            "num_key_value_heads": 1,
            "num_nextn_predict_layers": 3,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "q_lora_rank": 1280,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-20,
            "rope_scaling": {
                "beta_fast": 32,
                "beta_slow": 1,
                "factor": 16,
                "original_max_position_embeddings": 65536,
                "rope_type": "yarn",
            },
            "rope_theta": 10000,
            "routed_scaling_factor": 1.5,
            "scoring_func": "sqrtsoftplus",
            "sliding_window": 128,
            "swiglu_limit": 10.0,
            "tie_word_embeddings": False,
            "topk_method": "noaux_tc",
            "use_cache": True,
            "vocab_size": 129280,
        },
        "vision_config": {
            "downsample_ratio": 3,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "max_image_tokens": 1024,
            "max_wh_ratio": None,
            "min_pixels": 295936,
            "model_type": "deepseek_v41_vision",
            "num_attention_heads": 16,
            "num_hidden_layers": 32,
            "patch_size": 14,
            "rope_theta": 10000,
        },
    }
}
NO_FILE = {"deepseek_v41_text": "published files have the text under text_config of deepseek_v41"}

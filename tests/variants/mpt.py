"""Tiny configurations of MPT and its published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "mpt",
    "vocab_size": 61,
    "d_model": 40,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 64,
    "layer_norm_epsilon": 1e-2,
    "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.3},
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# transformers 5.24 counts the positions of its biases over documents, which its masks do not separate.
SEPARATE = {"packed": "documents see each other"}

REFUSED = {"mpt": {"expansion_ratio", "logit_scale", "no_bias"}}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"mpt": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, in the published dialect."""
    attention = {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "clip_qkv": None}
    attention |= {"attn_type": "multihead_attention", "attn_uses_sequence_id": False, "prefix_lm": False}
    attention |= {"qk_ln": False, "softmax_scale": None}
    own = {"architectures": ["MPTForCausalLM"], "attn_config": attention, "d_model": 7168, "emb_pdrop": 0}
    own |= {"embedding_fraction": 1.0, "expansion_ratio": 4, "init_device": "cpu", "learned_pos_emb": True}
    own |= {"logit_scale": None, "max_seq_len": 8192, "n_heads": 64, "n_layers": 48, "no_bias": True, "resid_pdrop": 0}
    own |= {"norm_type": "low_precision_layernorm", "use_cache": False, "verbose": 0, "vocab_size": 50432}
    return {"mpt_30b": {"model_type": "mpt", "tokenizer_name": "EleutherAI/gpt-neox-20b"} | own}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"mpt_30b": 29_957_200_896}


# Parameter counts of the presets.
TOTALS: dict[str, int | str] = {"mpt-7b": 6_649_286_656, "mpt-30b": 29_957_200_896}

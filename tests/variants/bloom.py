"""Tiny configurations of BLOOM and its published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "bloom",
    "vocab_size": 61,
    "hidden_size": 36,
    "n_layer": 2,
    "n_head": 3,
    "layer_norm_epsilon": 1e-2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# transformers 5.24 counts the positions of its biases over documents, which its masks do not separate.
SEPARATE = {"packed": "documents see each other"}

REFUSED = {"bloom": {"apply_residual_connection_post_layernorm"}}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"bloom": TINY, "bloom_untied": TINY | {"hidden_size": 32, "n_head": 4, "tie_word_embeddings": False}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, in the published dialect."""
    own = {
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
    }
    own |= {"architectures": ["BloomForCausalLM"], "pad_token_id": 3, "bos_token_id": 1, "eos_token_id": 2}
    own |= {"hidden_dropout": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "n_embed": 14336}
    own |= {"masked_softmax_fusion": True, "n_layer": 70, "num_attention_heads": 112, "pretraining_tp": 4}
    own |= {"skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False, "unk_token_id": 0}
    return {"bloom_176b": {"model_type": "bloom", "vocab_size": 250880, "use_cache": True} | own}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"bloom_176b": 176_247_271_424}


# Parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "bloom-560m": 559_214_592,
    "bloom-1b1": 1_065_314_304,
    "bloom-1b7": 1_722_408_960,
    "bloom-3b": 3_002_557_440,
    "bloom-7b1": 7_069_016_064,
    "bloom": 176_247_271_424,
}

"""Tiny configurations of ModernBERT with its masked-LM head, and published sizes; heads: tests/parity/test_heads.py."""

from typing import Any

SEPARATE = {"packed": "its masks do not tell documents apart"}
OLDER_ROPES = ("full_attention", {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"})

TINY: dict[str, Any] = {
    "architectures": ["ModernBertForMaskedLM"],
    "model_type": "modernbert",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "local_attention": 9,
    "norm_eps": 1e-2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 3e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
_BIASES = dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True)


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    biased = TINY | _BIASES | {"decoder_bias": False, "hidden_activation": "silu", "classifier_activation": "relu"}
    return {"modernbert": TINY, "modernbert_biases": biased}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    return {
        "modernbert_large": {
            "architectures": ["ModernBertForMaskedLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 50281,
            "classifier_activation": "gelu",
            "classifier_bias": False,
            "classifier_dropout": 0.0,
            "classifier_pooling": "mean",
            "cls_token_id": 50281,
            "decoder_bias": True,
            "deterministic_flash_attn": False,
            "embedding_dropout": 0.0,
            "eos_token_id": 50282,
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "gradient_checkpointing": False,
            "hidden_activation": "gelu",
            "hidden_size": 1024,
            "initializer_cutoff_factor": 2.0,
            "initializer_range": 0.02,
            "intermediate_size": 2624,
            "layer_norm_eps": 1e-05,
            "local_attention": 128,
            "local_rope_theta": 10000.0,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "mlp_dropout": 0.0,
            "model_type": "modernbert",
            "norm_bias": False,
            "norm_eps": 1e-05,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "pad_token_id": 50283,
            "position_embedding_type": "absolute",
            "sep_token_id": 50282,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "transformers_version": "4.47.0.dev0",
            "vocab_size": 50368,
        }
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"modernbert_large": TOTALS["modernbert-large"]}


# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int] = {"modernbert-base": 149_655_232, "modernbert-large": 395_881_664}

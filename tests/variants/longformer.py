"""Tiny configurations of Longformer with its masked-LM head; other heads: tests/fnmodels/models/test_longformer.py."""

from typing import Any

from tests.variants import bert

SEPARATE = {"packed": "its masks do not tell documents apart"}

TINY: dict[str, Any] = bert.TINY | {
    "architectures": ["LongformerForMaskedLM"],
    "model_type": "longformer",
    "attention_window": [6, 6],
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "pad_token_id": 4,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "sep_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"longformer": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member, with the class of its weights."""
    return {
        "longformer_large_4096": {
            "architectures": ["LongformerForMaskedLM"],
            "attention_mode": "longformer",
            "attention_probs_dropout_prob": 0.1,
            "attention_window": [512] * 24,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "gradient_checkpointing": False,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 1024,
            "ignore_attention_mask": False,
            "initializer_range": 0.02,
            "intermediate_size": 4096,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 4098,
            "model_type": "longformer",
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "pad_token_id": 1,
            "sep_token_id": 2,
            "type_vocab_size": 1,
            "vocab_size": 50265,
        }
    }


# Parameters of the presets: those of transformers' LongformerForMaskedLM.
TOTALS: dict[str, int] = {"longformer-base-4096": 148_711_257, "longformer-large-4096": 434_653_273}
REFUSED = {"longformer": {"add_cross_attention", "is_decoder", "tie_word_embeddings"}}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"longformer_large_4096": TOTALS["longformer-large-4096"]}

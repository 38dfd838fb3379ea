"""Tiny configurations of MPNet with its masked-LM head, and published sizes; other heads: parity/test_heads.py."""

from typing import Any

from tests.variants import bert

SEPARATE = {"packed": "its masks do not tell documents apart, and its biases count indices"}

TINY: dict[str, Any] = {name: value for name, value in bert.TINY.items() if name != "type_vocab_size"} | {
    "architectures": ["MPNetForMaskedLM"],
    "model_type": "mpnet",
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "pad_token_id": 1,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"mpnet": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    return {
        "mpnet_base": {
            "architectures": ["MPNetForMaskedLM"],
            "attention_probs_dropout_prob": 0.1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-05,
            "max_position_embeddings": 514,
            "model_type": "mpnet",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "pad_token_id": 1,
            "relative_attention_num_buckets": 32,
            "vocab_size": 30527,
        }
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"mpnet_base": TOTALS["mpnet-base"]}


# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int] = {"mpnet-base": 109_518_527, "all-mpnet-base-v2": 109_486_464}

# Fields refused at any changed value: no published encoder has them.
REFUSED = {"mpnet": {"relative_attention_num_buckets", "is_decoder", "add_cross_attention", "tie_word_embeddings"}}

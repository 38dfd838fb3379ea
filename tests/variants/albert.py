"""Tiny configurations of ALBERT with its masked-LM head, and published sizes; other heads: parity/test_heads.py."""

from typing import Any

from tests.variants import bert

SEPARATE = {"packed": "its masks do not tell documents apart"}

TINY: dict[str, Any] = bert.TINY | {
    "architectures": ["AlbertForMaskedLM"],
    "model_type": "albert",
    "embedding_size": 20,
    "num_hidden_layers": 4,
    "num_hidden_groups": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}. Each layer is passed once: tests/parity/test_heads.py passes them twice."""
    return {"albert": TINY | {"num_hidden_layers": 2}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    return {
        "albert_xxlarge_v2": {
            "architectures": ["AlbertForMaskedLM"],
            "attention_probs_dropout_prob": 0,
            "bos_token_id": 2,
            "classifier_dropout_prob": 0.1,
            "down_scale_factor": 1,
            "embedding_size": 128,
            "eos_token_id": 3,
            "gap_size": 0,
            "hidden_act": "gelu_new",
            "hidden_dropout_prob": 0,
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "inner_group_num": 1,
            "intermediate_size": 16384,
            "layer_norm_eps": 1e-12,
            "layers_to_keep": [],
            "max_position_embeddings": 512,
            "model_type": "albert",
            "net_structure_type": 0,
            "num_attention_heads": 64,
            "num_hidden_groups": 1,
            "num_hidden_layers": 12,
            "num_memory_blocks": 0,
            "pad_token_id": 0,
            "type_vocab_size": 2,
            "vocab_size": 30000,
        }
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"albert_xxlarge_v2": TOTALS["albert-xxlarge-v2"]}


# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int] = {
    "albert-base-v2": 11_221_680,
    "albert-large-v2": 16_795_824,
    "albert-xxlarge-v2": 206_368_944,
}

# Fields refused at any changed value: no published encoder has them.
REFUSED = {"albert": {"inner_group_num", "is_decoder", "tie_word_embeddings"}}

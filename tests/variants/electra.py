"""Tiny configurations of ELECTRA with its masked-LM head, and published sizes; other heads: parity/test_heads.py."""

from typing import Any

from tests.variants import bert

SEPARATE = {"packed": "its masks do not tell documents apart"}

TINY: dict[str, Any] = bert.TINY | {
    "architectures": ["ElectraForMaskedLM"],
    "model_type": "electra",
    "embedding_size": 20,
    "num_attention_heads": 2,
    "intermediate_size": 36,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"electra": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published generator."""
    return {
        "electra_large_generator": {
            "architectures": ["ElectraForMaskedLM"],
            "attention_probs_dropout_prob": 0.1,
            "embedding_size": 1024,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 256,
            "initializer_range": 0.02,
            "intermediate_size": 1024,
            "layer_norm_eps": 1e-12,
            "max_position_embeddings": 512,
            "model_type": "electra",
            "num_attention_heads": 4,
            "num_hidden_layers": 24,
            "pad_token_id": 0,
            "type_vocab_size": 2,
            "vocab_size": 30522,
        }
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"electra_large_generator": TOTALS["electra-large-generator"]}


# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int] = {
    "electra-small-discriminator": 13_549_057,
    "electra-small-generator": 13_546_682,
    "electra-large-generator": 51_295_290,
    "electra-base-discriminator": 109_483_009,
    "electra-large-discriminator": 335_142_913,
}

# Fields refused at any changed value: no published encoder has them.
REFUSED = {"electra": {"add_cross_attention", "is_decoder", "tie_word_embeddings"}}

"""Tiny configurations of GTE and Jina Embeddings v3, and published sizes; other heads: tests/parity/test_heads.py."""

from typing import Any

from tests.variants import bert

SEPARATE = {"packed": "its masks do not tell documents apart"}

TINY: dict[str, Any] = bert.TINY | {
    "architectures": ["GteForMaskedLM"],
    "model_type": "gte",
    "type_vocab_size": 1,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
}
_JINA = {"architectures": ["JinaEmbeddingsV3ForMaskedLM"], "model_type": "jina_embeddings_v3"}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"gte": TINY, "jina_embeddings_v3": TINY | _JINA}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member in transformers' form."""
    return {
        "gte_multilingual_base": {
            "architectures": ["GteForMaskedLM"],
            "attention_probs_dropout_prob": 0.0,
            "classifier_dropout": 0.0,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 768,
            "initializer_range": 0.02,
            "intermediate_size": 3072,
            "layer_norm_eps": 1e-12,
            "max_position_embeddings": 8192,
            "model_type": "gte",
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "pad_token_id": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 160000.0},
            "type_vocab_size": 1,
            "vocab_size": 250048,
        }
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"gte_multilingual_base": TOTALS["gte-multilingual-base"]}


# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int] = {"gte-multilingual-base": 306_210_496, "jina-embeddings-v3": 559_364_096}

# Fields refused at any changed value: no published encoder has them.
REFUSED = {name: {"tie_word_embeddings"} for name in ("gte", "jina_embeddings_v3")}

NO_FILE = {"jina_embeddings_v3": "no copy is at hand; one that transformers writes is read in test_release_configs.py"}

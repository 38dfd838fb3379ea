"""A tiny configuration of DistilBERT with its masked-LM head, and published sizes."""

from typing import Any

SEPARATE = {"packed": "its masks do not tell documents apart"}

TINY: dict[str, Any] = {
    "architectures": ["DistilBertForMaskedLM"],
    "model_type": "distilbert",
    "vocab_size": 61,
    "dim": 32,
    "num_hidden_layers": 2,
    "n_heads": 2,
    "hidden_dim": 44,
    "activation": "relu",
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
    "dropout": 0.0,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"distilbert": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    return {
        "distilbert_multilingual": {
            "activation": "gelu",
            "architectures": ["DistilBertForMaskedLM"],
            "attention_dropout": 0.1,
            "dim": 768,
            "dropout": 0.1,
            "hidden_dim": 3072,
            "initializer_range": 0.02,
            "max_position_embeddings": 512,
            "model_type": "distilbert",
            "n_heads": 12,
            "n_layers": 6,
            "output_past": True,
            "pad_token_id": 0,
            "qa_dropout": 0.1,
            "seq_classif_dropout": 0.2,
            "sinusoidal_pos_embds": False,
            "tie_weights_": True,
            "vocab_size": 119547,
        }
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"distilbert_multilingual": TOTALS["distilbert-base-multilingual-cased"]}


# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int] = {
    "distilbert-base-uncased": 66_985_530,
    "distilbert-base-cased": 65_812_036,
    "distilbert-base-multilingual-cased": 135_445_755,
}

# Fields refused at any changed value: no published encoder has them, and num_hidden_layers above is n_layers.
REFUSED = {"distilbert": {"n_layers", "tie_word_embeddings"}}

"""Tiny configurations of ESM-2 and ESM-1b with a masked-LM head, and published sizes; heads: parity/test_heads.py."""

from typing import Any

from torch import Tensor

from tests.variants import bert

SEPARATE = {"packed": "its masks do not tell documents apart"}
SEPARATE |= dict.fromkeys(("esm left", "esm right"), "mask tokens in the padding count as if they were of the text")

TINY: dict[str, Any] = bert.TINY | {
    "architectures": ["EsmForMaskedLM"],
    "model_type": "esm",
    "num_attention_heads": 2,
    "intermediate_size": 36,
    "pad_token_id": 1,
    "mask_token_id": 4,
    "token_dropout": True,
    "position_embedding_type": "rotary",
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    older = {"position_embedding_type": "absolute", "emb_layer_norm_before": True, "token_dropout": False}
    return {"esm": TINY, "esm_absolute": TINY | older}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    return {
        "esm2_15b": {
            "architectures": ["EsmForMaskedLM"],
            "attention_probs_dropout_prob": 0.0,
            "classifier_dropout": None,
            "emb_layer_norm_before": False,
            "esmfold_config": None,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.0,
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 20480,
            "is_folding_model": False,
            "layer_norm_eps": 1e-05,
            "mask_token_id": 32,
            "max_position_embeddings": 1026,
            "model_type": "esm",
            "num_attention_heads": 40,
            "num_hidden_layers": 48,
            "pad_token_id": 1,
            "position_embedding_type": "rotary",
            "token_dropout": True,
            "use_cache": True,
            "vocab_list": None,
            "vocab_size": 33,
        }
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"esm2_15b": TOTALS["esm2-15b"]}


def as_published(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """With today's names of norms."""
    names = {name: name.replace("Norm.gamma", "Norm.weight").replace("Norm.beta", "Norm.bias") for name in tensors}
    return {name: tensors[was] for was, name in names.items()}


# The head of contacts, and the table of rotary frequencies.
LEFT_OUT = {"esm": (".regression.weight", ".regression.bias", ".inv_freq")}


# Parameter counts of the presets: those of transformers' models without the head of contacts.
TOTALS: dict[str, int] = {
    "esm2-8m": 7_512_353,
    "esm2-35m": 33_501_153,
    "esm2-150m": 148_139_553,
    "esm2-650m": 651_042_593,
    "esm2-3b": 2_839_004_193,
    "esm2-15b": 15_129_098_273,
    "esm1b-650m": 652_358_433,
}

# Fields refused at any changed value: no published encoder has them.
REFUSED = {
    "esm": {
        *("add_cross_attention", "is_decoder", "is_folding_model", "position_embedding_type", "tie_word_embeddings"),
    }
}

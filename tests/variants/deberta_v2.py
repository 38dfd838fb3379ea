"""Tiny configurations of DeBERTa and V2 with a masked-LM head and published sizes; other heads: parity.test_heads."""

from typing import Any

from tests.variants import bert

SEPARATE = {"packed": "its masks do not tell documents apart"}

TINY: dict[str, Any] = bert.TINY | {
    "architectures": ["DebertaV2ForMaskedLM"],
    "model_type": "deberta-v2",
    "type_vocab_size": 0,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "relative_attention": True,
    "position_buckets": 6,
    "max_relative_positions": 12,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}
_NEWER = ("position_buckets", "norm_rel_ebd", "share_att_key")
FIRST = {name: value for name, value in TINY.items() if name not in _NEWER}
FIRST |= {"architectures": ["DebertaForMaskedLM"], "model_type": "deberta"}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    each = TINY | {"position_buckets": -1, "type_vocab_size": 2}
    return {"deberta_v2": TINY, "deberta_v2_each": each, "deberta": FIRST}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    return {
        "deberta_v3_large": {
            "model_type": "deberta-v2",
            "attention_probs_dropout_prob": 0.1,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 1024,
            "initializer_range": 0.02,
            "intermediate_size": 4096,
            "max_position_embeddings": 512,
            "relative_attention": True,
            "position_buckets": 256,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": "p2c|c2p",
            "layer_norm_eps": 1e-7,
            "max_relative_positions": -1,
            "position_biased_input": False,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "type_vocab_size": 0,
            "vocab_size": 128100,
        },
        "deberta_xlarge": {
            "model_type": "deberta",
            "attention_probs_dropout_prob": 0.1,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 1024,
            "initializer_range": 0.02,
            "intermediate_size": 4096,
            "max_position_embeddings": 512,
            "relative_attention": True,
            "pos_att_type": "c2p|p2c",
            "layer_norm_eps": 1e-7,
            "max_relative_positions": -1,
            "padding_idx": 0,
            "position_biased_input": False,
            "num_attention_heads": 16,
            "num_hidden_layers": 48,
            "type_vocab_size": 0,
            "vocab_size": 50265,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"deberta_v3_large": TOTALS["deberta-v3-large"], "deberta_xlarge": TOTALS["deberta-xlarge"]}


# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int] = {
    "deberta-base": 139_244_121,
    "deberta-large": 406_264_921,
    "deberta-xlarge": 758_905_945,
    "deberta-v3-xsmall": 70_958_820,
    "deberta-v3-small": 142_024_548,
    "deberta-v3-base": 184_551_780,
    "deberta-v3-large": 435_191_908,
    "mdeberta-v3-base": 279_061_880,
}

# Fields refused at any changed value: no published model of V3 has them.
_REFUSED = {"pooler_hidden_act", "position_biased_input", "relative_attention", "tie_word_embeddings"}
REFUSED = {"deberta-v2": _REFUSED, "deberta": _REFUSED}

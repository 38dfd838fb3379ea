"""Tiny configurations of RoBERTa with its masked-LM head, and published sizes; other heads: parity/test_heads.py."""

import json
from typing import Any

from tests.variants import bert

SEPARATE = {"packed": "its masks do not tell documents apart"}

TINY: dict[str, Any] = bert.TINY | {
    "architectures": ["RobertaForMaskedLM"],
    "model_type": "roberta",
    "type_vocab_size": 1,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "pad_token_id": 4,
}
_SEVERAL = {"camembert": "Camembert", "data2vec-text": "Data2VecText", "xlm-roberta-xl": "XLMRobertaXL"}
_SEVERAL |= {"roberta-prelayernorm": "RobertaPreLayerNorm"}
_XLM = {"architectures": ["XLMRobertaForMaskedLM"], "model_type": "xlm-roberta"}
_FIRST = ("xlm-roberta-xl", "roberta-prelayernorm")  # norms first; the others are RoBERTa by other names


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    relu = {"hidden_act": "relu", "pad_token_id": 1}  # the head has GELU all the same
    others = {
        name.replace("-", "_"): TINY
        | {"model_type": name, "architectures": [f"{classes}ForMaskedLM"], "num_hidden_layers": 1 + (name in _FIRST)}
        for name, classes in _SEVERAL.items()
    }
    return {"roberta": TINY, "roberta_relu": TINY | relu, "xlm_roberta": TINY | _XLM, **others}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published members."""
    large = {
        "architectures": ["RobertaForMaskedLM"],
        "attention_probs_dropout_prob": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 4096,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 514,
        "model_type": "roberta",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "pad_token_id": 1,
        "type_vocab_size": 1,
        "vocab_size": 50265,
    }
    return {"roberta_large": large, "xlm_roberta_large": large | _XLM | {"output_past": True, "vocab_size": 250002}}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"roberta_large": TOTALS["roberta-large"], "xlm_roberta_large": TOTALS["xlm-roberta-large"]}


# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int] = {
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "xlm-roberta-base": 278_295_186,
    "xlm-roberta-large": 560_142_482,
    "camembert-base": 110_655_493,
    "xlm-roberta-xl": 3_482_741_760,
    "bge-m3": 567_754_752,
    "bge-reranker-v2-m3": 567_755_777,
}

# Fields refused at any changed value: no published encoder has them.
_NAMES = ("roberta", "xlm-roberta", *_SEVERAL)
REFUSED = {name: {"add_cross_attention", "is_decoder", "tie_word_embeddings"} for name in _NAMES}

# The published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "camembert-base": {
    "architectures": ["CamembertForMaskedLM"], "model_type": "camembert", "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 5, "eos_token_id": 6, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
    "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05, "max_position_embeddings": 514,
    "num_attention_heads": 12, "num_hidden_layers": 12, "output_past": true, "pad_token_id": 1, "type_vocab_size":
    1, "vocab_size": 32005
  },
  "xlm-roberta-xl": {
    "architectures": ["XLMRobertaXLForMaskedLM"], "model_type": "xlm-roberta-xl", "attention_probs_dropout_prob":
    0.1, "bos_token_id": 0, "eos_token_id": 2, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size":
    2560, "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 514,
    "num_attention_heads": 32, "num_hidden_layers": 36, "pad_token_id": 1, "position_embedding_type": "absolute",
    "tokenizer_class": "XLMRobertaTokenizer", "torch_dtype": "float32", "type_vocab_size": 1, "vocab_size": 250880
  }
}""")

NO_FILE = dict.fromkeys(
    ("data2vec-text", "roberta-prelayernorm"),
    "no copy is at hand; one that transformers writes is read in test_release_configs.py",
)

"""Tiny configurations of BERT with its masked-LM head, and published sizes; other heads: tests/parity/test_heads.py."""

from typing import Any

SEPARATE = {"packed": "its masks do not tell documents apart"}

TINY: dict[str, Any] = {
    "architectures": ["BertForMaskedLM"],
    "model_type": "bert",
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 44,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-2,
    "attention_probs_dropout_prob": 0.0,
    "hidden_dropout_prob": 0.0,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    ernie = {"model_type": "ernie", "architectures": ["ErnieForMaskedLM"], "use_task_id": True}
    megatron = {"model_type": "megatron-bert", "architectures": ["MegatronBertForMaskedLM"]}
    return {
        "bert": TINY,
        "bert_relu": TINY | {"hidden_act": "relu", "type_vocab_size": 1},
        "ernie": TINY | ernie,
        "megatron_bert": TINY | megatron,
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    return {
        "bert_large": {
            "architectures": ["BertForMaskedLM"],
            "model_type": "bert",
            "attention_probs_dropout_prob": 0.1,
            "gradient_checkpointing": False,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 1024,
            "initializer_range": 0.02,
            "intermediate_size": 4096,
            "layer_norm_eps": 1e-12,
            "max_position_embeddings": 512,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "pad_token_id": 0,
            "position_embedding_type": "absolute",
            "type_vocab_size": 2,
            "use_cache": True,
            "vocab_size": 30522,
        },
        "ernie_3_base": {
            "attention_probs_dropout_prob": 0.1,
            "hidden_act": "gelu",
            "hidden_dropout_prob": 0.1,
            "hidden_size": 768,
            "initializer_range": 0.02,
            "max_position_embeddings": 2048,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "task_type_vocab_size": 3,
            "type_vocab_size": 4,
            "use_task_id": True,
            "vocab_size": 40000,
            "layer_norm_eps": 1e-05,
            "model_type": "ernie",
            "architectures": ["ErnieForMaskedLM"],
            "intermediate_size": 3072,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"bert_large": 335_174_458, "ernie_3_base": 117_986_368}


# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int | str] = {
    "bert-base-uncased": 109_514_298,
    "bert-large-uncased": 335_174_458,
    "all-minilm-l6-v2": 22_713_216,
}

# Fields refused at any changed value: no published encoder has them.
_REFUSED = {"add_cross_attention", "is_decoder", "position_embedding_type", "tie_word_embeddings"}
REFUSED = dict.fromkeys(("bert", "ernie", "megatron-bert"), _REFUSED)

NO_FILE = {"megatron-bert": "no copy is at hand; one that transformers writes is read in test_release_configs.py"}

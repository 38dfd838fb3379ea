"""Tiny configurations of EuroBERT with its masked-LM head, and published sizes; heads: tests/parity/test_heads.py."""

from typing import Any

SEPARATE = {"packed": "its masks do not tell documents apart"}

TINY: dict[str, Any] = {
    "architectures": ["EuroBertForMaskedLM"],
    "model_type": "eurobert",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "mask_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 250000},
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    biased = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"}
    # The first is trained: without biases, gradients near 0 make rounding visible in the steps of AdamW.
    return {"eurobert_bias_tied": TINY | biased, "eurobert": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    return {
        "eurobert_2_1b": {
            "architectures": ["EuroBertForMaskedLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_eurobert.EuroBertConfig"},
            "bos_token": "<|begin_of_text|>",
            "bos_token_id": 128000,
            "classifier_pooling": "late",
            "eos_token": "<|end_of_text|>",
            "eos_token_id": 128001,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_dropout": 0.0,
            "hidden_size": 2304,
            "initializer_range": 0.02,
            "intermediate_size": 6144,
            "mask_token": "<|mask|>",
            "mask_token_id": 128002,
            "max_position_embeddings": 8192,
            "mlp_bias": False,
            "model_type": "eurobert",
            "num_attention_heads": 18,
            "num_hidden_layers": 32,
            "num_key_value_heads": 6,
            "pad_token": "<|end_of_text|>",
            "pad_token_id": 128001,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 250000,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": False,
            "vocab_size": 128256,
        }
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"eurobert_2_1b": TOTALS["eurobert-2.1b"]}


# Fields refused at values that transformers does not know either, and takes for nothing.
REFUSED = {"eurobert": {"classifier_pooling"}}

# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int] = {"eurobert-210m": 310_266_624, "eurobert-610m": 755_625_600, "eurobert-2.1b": 2_403_092_736}

"""Tiny configurations of XLM, one per way in which its maths can differ, and published sizes."""

from typing import Any

SEPARATE = {"packed": "its masks do not tell documents apart"}

TINY: dict[str, Any] = {
    "architectures": ["XLMWithLMHeadModel"],
    "model_type": "xlm",
    "vocab_size": 61,
    "emb_dim": 32,
    "n_layers": 2,
    "n_heads": 2,
    "max_position_embeddings": 64,
    "layer_norm_eps": 1e-2,
    "attention_dropout": 0.0,
    "dropout": 0.0,
    "pad_token_id": -1,  # another token of this id would be padding in transformers
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"xlm": TINY, "xlm_relu": TINY | {"gelu_activation": False}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    return {
        "xlm_100": {
            "architectures": ["XLMWithLMHeadModel"],
            "asm": False,
            "attention_dropout": 0.1,
            "bos_index": 0,
            "causal": False,
            "dropout": 0.1,
            "emb_dim": 1280,
            "embed_init_std": 0.02795084971874737,
            "eos_index": 1,
            "gelu_activation": True,
            "init_std": 0.02,
            "is_encoder": True,
            "lang_id": 0,
            "layer_norm_eps": 1e-12,
            "mask_index": 5,
            "mask_token_id": 0,
            "max_position_embeddings": 512,
            "model_type": "xlm",
            "n_heads": 16,
            "n_langs": 100,
            "n_layers": 16,
            "pad_index": 2,
            "pad_token_id": 2,
            "sinusoidal_embeddings": False,
            "summary_activation": None,
            "summary_first_dropout": 0.1,
            "summary_proj_to_labels": True,
            "summary_type": "first",
            "summary_use_proj": True,
            "unk_index": 3,
            "use_lang_emb": False,
            "vocab_size": 200000,
        }
    }


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"xlm_100": TOTALS["xlm-mlm-100-1280"]}


# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int] = {
    "xlm-mlm-en-2048": 667_119_041,
    "xlm-mlm-17-1280": 571_696_960,
    "xlm-mlm-100-1280": 571_696_960,
    "xlm-mlm-xnli15-1024": 249_071_384,
}

# The head is the embedding, and no published file is causal.
REFUSED = {"xlm": {"causal", "tie_word_embeddings"}}

"""Tiny configurations of GPT-Neo and its published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "gpt_neo",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_layers": 2,
    "num_heads": 4,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 6,
    "max_position_embeddings": 128,
    "layer_norm_epsilon": 1e-2,
    "classifier_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"gpt_neo": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, in the published dialect."""
    own = {"architectures": ["GPTNeoForCausalLM"], "vocab_size": 50257, "hidden_size": 2560, "num_layers": 32}
    own |= {
        "num_heads": 20,
        "attention_types": [[["global", "local"], 16]],
        "attention_layers": ["global", "local"] * 16,
    }
    own |= {"window_size": 256, "max_position_embeddings": 2048, "layer_norm_epsilon": 1e-5, "resid_dropout": 0}
    own |= {"activation_function": "gelu_new", "bos_token_id": 50256, "eos_token_id": 50256, "embed_dropout": 0}
    own |= {
        "attention_dropout": 0,
        "gradient_checkpointing": False,
        "initializer_range": 0.02,
        "summary_type": "cls_index",
    }
    own |= {"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "use_cache": True}
    return {"gpt_neo_2_7b": {"model_type": "gpt_neo"} | own | {"summary_use_proj": True, "intermediate_size": None}}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"gpt_neo_2_7b": 2_651_307_520}


# Parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "gpt-neo-125m": 125_198_592,
    "gpt-neo-1.3b": 1_315_575_808,
    "gpt-neo-2.7b": 2_651_307_520,
}

"""Tiny configurations of Nemotron, one per variation of its maths, and its published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "nemotron",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e2, "partial_rotary_factor": 0.5},
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    linear = {"rope_type": "linear", "rope_theta": 1e2, "factor": 3.0, "partial_rotary_factor": 1.0}
    biased = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 8}
    return {"nemotron": TINY, "nemotron_biases_tied": TINY | biased | {"rope_parameters": linear}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, and of one whose file has two fields for the head width.

    Sizes of the first are those of table 1 of arXiv 2406.11704.
    """
    common: dict[str, Any] = {
        "architectures": ["NemotronForCausalLM"],
        "model_type": "nemotron",
        "vocab_size": 256000,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "hidden_act": "relu2",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": 0.0134,
        "tie_word_embeddings": False,
        "bos_token_id": 2,
        "eos_token_id": 3,
    }
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    return {
        "nemotron_4_340b": common | dict(zip(names, (18432, 73728, 96, 96, 192), strict=True)),
        "minitron_8b": common | {"kv_channels": 128} | dict(zip(names, (4096, 16384, 32, 48, 128), strict=True)),
    }


def sizes() -> dict[str, int]:
    """{name: number of parameters}; the report of the first states 9.4B for embeddings and 331.6B for the rest."""
    return {"nemotron_4_340b": 341_029_195_776, "minitron_8b": 8_271_699_968}


# Published parameter counts of the presets. The report of the 15B states 3.2B for embeddings and 12.5B for the rest.
TOTALS: dict[str, int | str] = {
    "minitron-4b": "4.19B",
    "minitron-8b": "8.27B",
    "nemotron-4-15b": "15.6B",
    "nemotron-4-340b": "341B",
}

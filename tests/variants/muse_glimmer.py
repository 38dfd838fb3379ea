"""Tiny configuration of Muse Glimmer's text, with every kind of layer, and its published size."""

from typing import Any

TINY: dict[str, Any] = {
    "model_type": "muse_glimmer_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "post_norm_eps": 3e-2,
    "sliding_window": 6,
    "qk_scale_factor": 1.7,
    "output_multiplier": 0.6,
    "final_logit_softcapping": 5.0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "layer_rope_theta": [50.0, 50.0, 0, 0],
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"muse_glimmer_text": TINY | {"attention_bias": True}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the text of the published model, as transformers 5.24 has it."""
    near = "sliding_attention"
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 200000,
        "eos_token_id": 200001,
        "final_logit_softcapping": 20.0,
        "head_dim": 128,
        "hidden_activation": "silu",
        "hidden_size": 6656,
        "initializer_range": 0.02,
        "intermediate_size": 19968,
        "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0] * 13,
        "layer_types": [near, near, near, "full_attention"] * 13,
        "max_position_embeddings": 131072,
        "model_type": "muse_glimmer_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 52,
        "num_key_value_heads": 2,
        "output_multiplier": 0.19611613513818404,
        "pad_token_id": None,
        "post_norm_eps": 1e-08,
        "qk_scale_factor": 3.87,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": 2048,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 202048,
    }
    return {"muse_glimmer_30b": text}


def sizes() -> dict[str, int]:
    """{name: number of parameters of the text}, counted by hand from the shapes."""
    D, H = 6656, 128
    layer = 3 * D * 32 * H + 2 * D * 2 * H + 3 * D * 19968 + 4 * D
    return {"muse_glimmer_30b": 2 * 202048 * D + D + 52 * layer}


# transformers reads no theta of a single layer but 0; here those that differ from the model's are refused.
REFUSED = {"muse_glimmer_text": {"rope_parameters..rope_theta"}}
NO_FILE = {"muse_glimmer_text": "published within muse_glimmer's text_config"}

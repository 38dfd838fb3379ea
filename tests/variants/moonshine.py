"""Tiny configurations of Moonshine and the published totals. The stacks differ in layers and activations."""

from typing import Any

TINY: dict[str, Any] = {
    "architectures": ["MoonshineForConditionalGeneration"],
    "model_type": "moonshine",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 44,
    "encoder_num_hidden_layers": 2,
    "decoder_num_hidden_layers": 3,
    "encoder_num_attention_heads": 3,
    "decoder_num_attention_heads": 3,
    "max_position_embeddings": 20,
    "partial_rotary_factor": 0.6,  # 4 of 8 dimensions
    "pad_head_dim_to_multiple_of": 5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    other = {"attention_bias": True, "encoder_hidden_act": "relu", "decoder_hidden_act": "gelu", "rope_theta": 100.0}
    other |= {"encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2}  # by default 10 of 12 dimensions
    default = {name: value for name, value in TINY.items() if "head_dim" not in name and "partial" not in name}
    return {"moonshine": TINY, "moonshine_biased": default | other}


# Parameter counts of the presets, which transformers' models of these configs have.
TOTALS: dict[str, int] = {"moonshine-tiny": 27_092_736, "moonshine-base": 61_513_920}

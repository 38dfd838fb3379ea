"""Tiny configurations of Muse Spark's text, with every kind of layer, and its published size."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")  # as in transformers 5.24

TINY: dict[str, Any] = {
    "model_type": "muse_spark_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "moe_intermediate_size": 12,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "moe_hidden_size": 20,
    "routed_scaling_factor": 1.7,
    "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
    "residual_gate_temperature": 0.7,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-1,  # with 1e-2 gradients of a compiled block are off by 1.8e-4 in fp32, by 8e-14 in fp64
    "post_norm_eps": 3e-1,
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
    return {"muse_spark_text": TINY | {"attention_bias": True}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the text with the defaults of transformers 5.24, which are the published model's."""
    near, far = "sliding_attention", "full_attention"
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 200000,
        "eos_token_id": 200001,
        "final_logit_softcapping": 20.0,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 8192,
        "initializer_range": 0.02,
        "intermediate_size": 16384,
        "layer_rope_theta": [500000.0, 0, *[500000.0, 500000.0, 500000.0, 0] * 15],
        "layer_types": [near, far, *[near, near, near, far] * 15],
        "max_position_embeddings": 1048576,
        "mlp_layer_types": ["sparse"] * 62,
        "model_type": "muse_spark_text",
        "moe_hidden_size": 4096,
        "moe_intermediate_size": 4096,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "num_local_experts": 256,
        "output_multiplier": 0.1767766952966369,
        "output_router_logits": False,
        "pad_token_id": None,
        "post_norm_eps": 1e-08,
        "qk_scale_factor": 5.4730064863875,
        "residual_gate_temperature": 0.3,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "routed_scaling_factor": 1.0,
        "sliding_window": 2048,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": 202048,
    }
    return {"muse_spark_816b": text}


def sizes() -> dict[str, int]:
    """{name: number of parameters of the text}, counted by hand from the shapes; 816B without embeddings and head."""
    D, P, H = 8192, 4096, 64
    attention = 3 * D * 128 * H + 2 * D * 16 * H
    experts = 256 * 3 * P * 4096 + 256 * D + 256 + 2 * D * P + 2 * P
    return {"muse_spark_816b": 2 * 202048 * D + D + 62 * (attention + experts + 3 * D + 2 * D)}


# transformers reads no theta of a single layer but 0; here those that differ from the model's are refused.
REFUSED = {"muse_spark_text": {"rope_parameters..rope_theta"}}
# Of fp64: parameters off by 1e-15 of themselves change its own losses by 4e-15 in step 1, by 5e-12 in step 8.
TRAINING_TOLERANCE = {"muse_spark_text": 1e-11}
NO_FILE = {"muse_spark_text": "published within muse_spark's text_config"}
TOTALS: dict[str, int | str] = {"muse-spark-open": sizes()["muse_spark_816b"]}

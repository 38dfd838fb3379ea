"""Tiny configuration of Gemma 3n's text, with every kind of layer, and its published size."""

from typing import Any

from fnmodels.models.decoder import gemma3n

OLDER_ROPES = ("full_attention", {"sliding_attention": "rope_local_base_freq"})
TINY: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1.0,  # scores are not scaled, and with less fp32 gradients are off by more than 1e-5
    "sliding_window": 6,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 53,
    "altup_num_inputs": 3,
    "laurel_rank": 5,
    "num_kv_shared_layers": 1,
    "final_logit_softcapping": 6.0,
    "activation_sparsity_pattern": [0.7, 0.0, 0.0, 0.0],
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 300.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}


def variants() -> dict[str, Any]:
    """{name: config.json or Config}."""
    text = {name: value for name, value in TINY.items() if name != "model_type"}
    wrapped = gemma3n.Config.from_hf({"model_type": "gemma3n", "text_config": text})
    return {"gemma3n_text": TINY, "gemma3n_wrapped": wrapped}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the text of the largest member, as published but for its towers."""
    near = "sliding_attention"
    text = {
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_lr_multiplier": 1.0,
        "altup_num_inputs": 4,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2048,
        "hidden_size_per_layer_input": 256,
        "initializer_range": 0.02,
        "intermediate_size": [16384] * 35,
        "laurel_rank": 64,
        "layer_types": [near, near, near, near, "full_attention"] * 7,
        "max_position_embeddings": 32768,
        "model_type": "gemma3n_text",
        "num_attention_heads": 8,
        "num_hidden_layers": 35,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "use_cache": True,
        "vocab_size": 262400,
        "vocab_size_per_layer_input": 262144,
    }
    return {"gemma3n_e4b": text}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"gemma3n_e4b": TOTALS["gemma-3n-e4b"]}


# Parameter counts of the presets, which transformers' models of these configs have.
NO_FILE = {"gemma3n": 'its text is read, with part="text"; the towers are not'}
TOTALS: dict[str, int] = {"gemma-3n-e2b": 4_435_182_688, "gemma-3n-e4b": 6_835_235_568}

# Of one value, and those whose change here leaves no layer whose keys others may read.
REFUSED = {"gemma3n_text": {"activation_sparsity_pattern", "altup_correct_scale", "layer_types"}}

# Three scales of the reference are rounded to fp32 in its float64 too.
TRAINING_TOLERANCE = {"gemma3n_text": 1e-6}

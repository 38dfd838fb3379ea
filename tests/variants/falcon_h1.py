"""Tiny configurations of Falcon-H1, one per way in which its maths can differ, and its published sizes."""

import json
from typing import Any

TINY: dict[str, Any] = {
    "model_type": "falcon_h1",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "mamba_d_ssm": 48,
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7,
    "ssm_multipliers": [1.4, 0.8, 1.1, 0.9, 0.6],
    "mlp_multipliers": [1.5, 0.7],
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    biases = dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"), True)
    own = {"mamba_d_ssm": None, "mamba_d_head": "auto", "mamba_n_heads": 4, "mamba_conv_bias": False}
    own |= {"time_step_limit": [0.3, 1.0]}  # which transformers' decode ignores
    # mamba_norm_before_gate true is a field that parity changes in the first variant, with mamba_rms_norm
    normed = {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "tie_word_embeddings": True}
    return {"falcon_h1": TINY, "falcon_h1_norm": TINY | biases | own | normed}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of a published member."""
    return {"falcon_h1_0.5b": FILES["falcon-h1-0.5b"]}


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has}."""
    return {"falcon_h1_0.5b": 521_411_104}


BLIND = {"falcon_h1": {"mixer.limits"}}
SEPARATE = {
    "packed": "the convolution and the state run on from one document into the next",
    "left": "a bias of the projection before the convolution is seen in padding",
}

TOTALS: dict[str, int | str] = {"falcon-h1-0.5b": 521_411_104}

FILES: dict[str, dict[str, Any]] = json.loads("""{
  "falcon-h1-0.5b": {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "attention_bias": false,
    "attention_dropout": 0.0, "attention_in_multiplier": 1.0, "attention_out_multiplier": 0.9375,
    "attn_layer_indices": null, "bos_token_id": 1, "embedding_multiplier": 5.656854249492381, "eos_token_id": 11,
    "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 2048,
    "key_multiplier": 0.39062499999999994, "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128,
    "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_ssm": 1536, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 24, "mamba_norm_before_gate": false,
    "mamba_proj_bias": false, "mamba_rms_norm": false, "mamba_use_mlp": true, "max_position_embeddings": 16384,
    "mlp_bias": false, "mlp_expansion_factor": 8, "mlp_multipliers": [0.8838834764831844, 0.5859375],
    "num_attention_heads": 8, "num_hidden_layers": 36, "num_key_value_heads": 2, "num_logits_to_keep": 1,
    "pad_token_id": 0, "projectors_bias": false, "rms_norm_eps": 1e-05, "rope_scaling": null,
    "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25,
    "ssm_multipliers": [0.35355339059327373, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
    "ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
    "transformers_version": "4.52.0.dev0", "use_cache": true, "vocab_size": 32784
  }
}""")

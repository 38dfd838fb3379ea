"""Tiny configurations of Bamba, one per way in which its maths can differ, and its published sizes."""

import json
from typing import Any

TINY: dict[str, Any] = {
    "model_type": "bamba",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "attn_layer_indices": [1],
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    own = dict.fromkeys(("attention_bias", "mlp_bias", "mamba_proj_bias", "tie_word_embeddings"), True)
    own |= {"mamba_conv_bias": False, "mamba_expand": 3, "mamba_n_heads": 8, "mamba_d_head": "auto"}
    own |= {"time_step_limit": [0.3, 1.0]}  # which transformers' decode ignores
    return {"bamba": TINY, "bamba_bias_tied": TINY | own | {"attn_layer_indices": [0]}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member."""
    return {"bamba_9b": FILES["bamba-9b"]}


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has}."""
    return {"bamba_9b": 9_780_235_392}


BLIND = {"bamba": {"mixer.limits"}}
SEPARATE = {
    "packed": "the convolution and the state run on from one document into the next",
    "left": "a bias of the projection before the convolution is seen in padding",
}

TOTALS: dict[str, int | str] = {"bamba-9b": "9.78B"}

FILES: dict[str, dict[str, Any]] = json.loads("""{
  "bamba-9b": {
    "architectures": ["BambaForCausalLM"], "model_type": "bamba", "attention_dropout": 0.0,
    "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "bos_token_id": 128000, "eos_token_id": 128001,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "mamba_chunk_size": 256, "mamba_conv_bias": true, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_dt_rank": 256, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": false,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_logits_to_keep": 1,
    "pad_token_id": 0, "rms_norm_eps": 1e-05, "tie_word_embeddings": false,
    "transformers_version": "4.47.0.dev0", "use_cache": true, "use_mamba_kernels": true, "vocab_size": 128256
  }
}""")

"""Tiny configurations of Zamba 2, one per way in which its maths can differ, and its published sizes."""

from typing import Any

NO_FILE = {"zamba2": "no published file is at hand; these are the defaults of transformers"}
# Without a tied head transformers has blocks that are not shared; its code reads no use_conv_bias, and one of the
# tables of use_long_context alone.
REFUSED = {"zamba2": {"tie_word_embeddings", "use_conv_bias", "use_long_context"}}

TINY: dict[str, Any] = {
    "model_type": "zamba2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "layers_block_type": ["hybrid", "hybrid"],
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 4.0,  # so that sublayers within sublayers do not multiply errors of fp32
    "n_mamba_heads": 4,
    "mamba_ngroups": 2,
    "mamba_d_state": 12,
    "mamba_d_conv": 4,
    "chunk_size": 8,
    "time_step_min": 0.001,
    "adapter_rank": 6,
    "num_mem_blocks": 1,
    "use_mem_rope": True,
    "use_shared_attention_adapter": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}. Two blocks that layers read in turn: tests/fnmodels/models/test_zamba2.py."""
    other = {"use_mem_rope": False, "use_shared_attention_adapter": False, "add_bias_linear": True}
    other |= {"time_step_min": 0.3, "num_key_value_heads": 2, "layers_block_type": ["hybrid", "mamba"]}
    return {"zamba2": TINY, "zamba2_bias": TINY | other}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the defaults of transformers, which are those of the 2.7B model, with two blocks."""
    own = {"architectures": ["Zamba2ForCausalLM"], "vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 10240}
    own |= {"num_hidden_layers": 54, "num_attention_heads": 32, "num_key_value_heads": 32, "attention_head_dim": 160}
    own |= {"attention_hidden_size": 5120, "kv_channels": 80, "num_query_groups": 32, "max_position_embeddings": 4096}
    own |= {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "initializer_range": 0.02, "use_cache": True}
    own |= {"mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_ngroups": 1, "n_mamba_heads": 80}
    own |= {"mamba_headdim": 64, "time_step_min": 0.001, "time_step_max": 0.1, "time_step_floor": 1e-4}
    own |= {"use_mamba_kernels": True, "use_conv_bias": True, "chunk_size": 256, "use_mem_eff_path": False}
    own |= {"add_bias_linear": False, "attention_dropout": 0.0, "num_mem_blocks": 2, "adapter_rank": 128}
    own |= {"use_shared_attention_adapter": False, "use_mem_rope": False, "use_long_context": False}
    own |= {"num_logits_to_keep": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    hybrid = [*range(6, 43, 6), 47, 51]
    own |= {"layers_block_type": ["hybrid" if i in hybrid else "mamba" for i in range(54)], "hybrid_layer_ids": hybrid}
    return {"zamba2_2b": {"model_type": "zamba2", "tie_word_embeddings": True} | own}


BLIND = {"zamba2": {"mixer.limits"}, "zamba2_bias": {"rope.theta", "rope.partial"}}
SEPARATE = {
    "packed": "the convolution and the state run on from one document into the next",
    "left": "a bias of the projection before the convolution is seen in padding",
}

TOTALS: dict[str, int | str] = {"zamba2-2.7b": 2_662_214_560}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"zamba2_2b": 2_662_214_560}

"""Tiny configurations of MiniCPM 3 and Youtu-LLM and their published sizes."""

from typing import Any

TINY: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "bos_token_id": 1,
    "eos_token_id": 2,
}

REFUSED = {"minicpm3": {"head_dim", "num_attention_heads"}, "youtu": {"head_dim", "num_attention_heads"}}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    first = {"model_type": "minicpm3", "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 8, "attention_bias": True}
    return {"minicpm3": TINY | first, "youtu": TINY | {"model_type": "youtu", "tie_word_embeddings": False}}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models."""
    ranks = {"q_lora_rank": 768, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    first = {"architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", "attention_bias": False}
    first |= {"hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.1, "intermediate_size": 6400}
    first |= {"max_position_embeddings": 32768, "num_attention_heads": 40, "num_hidden_layers": 62, "use_cache": True}
    first |= {"num_key_value_heads": 40, "rms_norm_eps": 1e-5, "vocab_size": 73448, "scale_emb": 12}
    first |= {"dim_model_base": 256, "scale_depth": 1.4, "pretraining_tp": 1, "attention_dropout": 0.0, **ranks}
    wide = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    second = {"architectures": ["YoutuForCausalLM"], "model_type": "youtu", "vocab_size": 128256, "hidden_size": 2048}
    second |= {"intermediate_size": 6144, "num_hidden_layers": 32, "num_attention_heads": 16, "v_head_dim": 128, **wide}
    second |= {"num_key_value_heads": 16, "max_position_embeddings": 131072, "rope_theta": 1.6e6, "rms_norm_eps": 1e-6}
    return {"minicpm3_4b": first, "youtu_llm_2b": second | {"rope_interleave": True, "tie_word_embeddings": True}}


def sizes() -> dict[str, int]:
    """{name of a published model: its number of parameters}."""
    return {"minicpm3_4b": 4_073_875_968, "youtu_llm_2b": 1_961_560_064}


# Parameter counts of the presets.
TOTALS: dict[str, int | str] = {"minicpm3-4b": 4_073_875_968, "youtu-llm-2b": 1_961_560_064}

"""Tiny configurations of Mistral Small 4, one per variation of its maths, and its published sizes."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 0.25, "beta_slow": 0.05}
YARN |= {"original_max_position_embeddings": 5, "mscale": 1.3, "mscale_all_dim": 0.4, "llama_4_scaling_beta": 0.1}
TINY: dict[str, Any] = {
    "model_type": "mistral4",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 15,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "moe_intermediate_size": 12,
    "n_routed_experts": 9,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": YARN,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

REFUSED = {"mistral4": {"num_attention_heads"}}  # must be num_key_value_heads
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")  # 5.23: scores in bf16 too
NO_FILE = {"mistral4": "published within a wrapper's text_config"}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    half = {"q_lora_rank": None, "rope_interleave": False, "attention_bias": True, "norm_topk_prob": False}
    half |= {"routed_scaling_factor": 1.6, "tie_word_embeddings": True, "n_shared_experts": 2}
    return {"mistral4": TINY, "mistral4_no_latent_half": TINY | half}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the text part of Mistral Small 4, as transformers writes it."""
    yarn = {"type": "yarn", "rope_theta": 10000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
    yarn |= {"max_position_embeddings": 1048576, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}
    return {
        "mistral_small_4": {
            "architectures": ["Mistral4ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "first_k_dense_replace": 0,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "kv_lora_rank": 256,
            "max_position_embeddings": 1048576,
            "model_type": "mistral4",
            "moe_intermediate_size": 2048,
            "n_group": 1,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts_per_tok": 4,
            "num_hidden_layers": 36,
            "num_key_value_heads": 32,
            "q_lora_rank": 1024,
            "qk_head_dim": 128,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-6,
            "rope_interleave": True,
            "rope_parameters": yarn
            | {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5},
            "routed_scaling_factor": 1.0,
            "tie_word_embeddings": False,
            "topk_group": 1,
            "use_cache": True,
            "v_head_dim": 128,
            "vocab_size": 131072,
        }
    }


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes; published as 119B."""
    return {"mistral_small_4": 118_972_826_624}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {"mistral-small-4": 118_972_826_624}

"""Tiny configurations of Hunyuan, one per variation of its maths, and its published sizes."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")  # as in transformers 5.24
# without experts
BLIND = {name: {"num_experts_per_tok"} for name in ("hunyuan_v1_dense", "hunyuan_v1_dense_bias_tied")}

TINY: dict[str, Any] = {
    "model_type": "hunyuan_v1_dense",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}; dynamic scaling without alpha depends on the length."""
    alpha = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}
    dynamic = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 3.0}
    biased = {"attention_bias": True, "tie_word_embeddings": True, "head_dim": 8}
    return {
        "hunyuan_v1_dense": TINY | {"rope_parameters": alpha},
        "hunyuan_v1_moe": TINY
        | {"model_type": "hunyuan_v1_moe", "num_experts": 5, "moe_topk": 2, "intermediate_size": 20}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}},
        "hunyuan_v1_dense_bias_tied": TINY | biased | {"rope_parameters": dynamic, "max_position_embeddings": 16},
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, in the published dialect."""
    rope = {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    return {
        "hunyuan_7b": {
            "architectures": ["HunYuanDenseV1ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attention_head_dim": 128,
            "bos_token_id": 127958,
            "eod_token_id": 127957,
            "eos_token_id": 127960,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 14336,
            "max_position_embeddings": 262144,
            "model_type": "hunyuan_v1_dense",
            "num_attention_heads": 32,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "pad_token_id": 127961,
            "rms_norm_eps": 1e-5,
            "rope_scaling": rope | {"type": "dynamic"},
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_cla": False,
            "use_qk_norm": True,
            "vocab_size": 128167,
        },
    }


def sizes() -> dict[str, int]:
    """{name of a published model: number of parameters}; published as 7.5B, counted by hand."""
    return {"hunyuan_7b": 7_504_568_320}


TOTALS: dict[str, int | str] = {
    "hunyuan-a13b": "80B",
    "hunyuan-0.5b": 539_010_048,
    "hunyuan-1.8b": 1_791_080_448,
    "hunyuan-4b": 4_221_757_440,
    "hunyuan-7b": 7_504_568_320,
}

NO_FILE = {"hunyuan_v1_moe": "no copy is at hand; one that transformers writes is read in test_release_configs.py"}

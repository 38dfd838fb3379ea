"""Tiny configurations of GLM-4.5 and dots.llm1, one per variation of their maths; their published sizes."""

import json
from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

SEEDS = {"solar_open": 5, "glm4_moe": 5, "glm4_moe_qk_norm": 7, "dots1": 4}

BLIND = {"solar_open": {"intermediate_size"}}  # no dense layer

TINY: dict[str, Any] = {
    "model_type": "glm4_moe",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.6,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "attention_bias": True,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _glm(rope: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**TINY, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0} | rope, **changes}


def _dots(**changes: Any) -> dict[str, Any]:
    values = TINY | {"model_type": "dots1", "n_shared_experts": 2, "attention_bias": False, "sliding_window": None}
    del values["num_nextn_predict_layers"]
    return {**values, "rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, **changes}


def _sarvam() -> dict[str, Any]:
    own = {"model_type": "sarvam_moe", "use_qk_norm": True, "n_group": 2, "topk_group": 1, "attention_bias": False}
    own |= {"moe_intermediate_size": 20}
    return _glm({"partial_rotary_factor": 1.0}, num_hidden_layers=2, **own)


def _solar() -> dict[str, Any]:
    unknown = ("first_k_dense_replace", "intermediate_size", "num_nextn_predict_layers")
    own = {"model_type": "solar_open", "num_hidden_layers": 2, "n_group": 2, "topk_group": 1, "norm_topk_prob": False}
    values = _glm({"partial_rotary_factor": 1.0}, **own)
    return {name: value for name, value in values.items() if name not in unknown}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    yarn: dict[str, Any] = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5}
    yarn |= {"original_max_position_embeddings": 16, "partial_rotary_factor": 0.7}
    return {
        "glm4_moe": _glm({}),  # by default half of each head rotates
        "glm4_moe_qk_norm": _glm({"partial_rotary_factor": 0.5}, use_qk_norm=True, n_shared_experts=2),
        "glm4_moe_groups_yarn": _glm(
            yarn,
            n_group=4,
            topk_group=2,
            attention_bias=False,
            norm_topk_prob=False,
            tie_word_embeddings=True,
        ),
        "dots1": _dots(),
        "dots1_groups_bias": _dots(
            n_group=4, topk_group=2, attention_bias=True, norm_topk_prob=False, tie_word_embeddings=True
        ),
        "sarvam_moe": _sarvam(),
        "solar_open": _solar(),
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models, in the published dialect."""
    return {
        "glm_4_7": {
            "architectures": ["Glm4MoeForCausalLM"],
            "attention_bias": True,
            "attention_dropout": 0.0,
            "pad_token_id": 151329,
            "eos_token_id": [151329, 151336, 151338],
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "partial_rotary_factor": 0.5,
            "initializer_range": 0.02,
            "intermediate_size": 12288,
            "max_position_embeddings": 202752,
            "model_type": "glm4_moe",
            "moe_intermediate_size": 1536,
            "norm_topk_prob": True,
            "num_attention_heads": 96,
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 160,
            "n_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "num_hidden_layers": 92,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_qk_norm": True,
            "vocab_size": 151552,
        },
        "dots_llm1": {
            "architectures": ["Dots1ForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 10944,
            "max_position_embeddings": 32768,
            "model_type": "dots1",
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "num_attention_heads": 32,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 62,
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "noaux_tc",
            "sliding_window": None,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": 152064,
        },
    }


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes.

    3,988,069,792 of GLM 4.7's are in the MTP module; with its copies of embedding and head the files have 358B.
    Published as 355B and 142B.
    """
    return {"glm_4_7": 356_785_898_816, "dots_llm1": 142_774_381_696}


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "glm-4.5": 358_337_791_296 - 2 * 151552 * 5120,
    "glm-4.5-air": 110_468_824_832 - 2 * 151552 * 4096,
    "dots.llm1": 142_774_381_696,
    "solar-open-100b": 102_651_799_552,
    "sarvam-30b": "32B",
}

# Fields refused at any changed value: alone they contradict other fields, or no published model has them.
REFUSED = {
    "sarvam_moe": {"num_mtp_layers"},
    "glm4_moe": {"num_mtp_layers", "rope_parameters..partial_rotary_factor"},
}

ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")  # as in transformers 5.23

# The published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "solar-open-100b": {
    "architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open", "first_k_dense_replace": 0, "head_dim":
    128, "hidden_size": 4096, "intermediate_size": 10240, "max_position_embeddings": 131072,
    "moe_intermediate_size": 1280, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 8,
    "partial_rotary_factor": 1.0, "rms_norm_eps": 1e-05, "rope_scaling": {"type": "yarn", "factor": 2.0,
    "original_max_position_embeddings": 65536}, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
    "tie_word_embeddings": false, "vocab_size": 196608
  }
}""")

NO_FILE = {"sarvam_moe": "no copy is at hand; one that transformers writes is read in test_release_configs.py"}

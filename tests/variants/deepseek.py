"""Tiny configurations of the DeepSeek line, one per variation of its maths, and its published sizes.

transformers has no kimi_k2, which is compared with deepseek_v3, the same model under another name.
"""

import json
from typing import Any

from torch import Tensor

from fnmodels.ops.moe.router import RouterDtypes

STANDS_FOR = {"kimi_k2": "deepseek_v3"}
BLIND = {
    "deepseek_v3_dense": {  # no MoE layer
        *("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_shared_experts", "n_group"),
        *("topk_group", "norm_topk_prob", "routed_scaling_factor", "softmax_scores", "mlp_norm"),
    },
    "deepseek_v2_lite": {"intermediate_size"},  # all layers are MoE layers
    "kimi_k2": {"rope.truncate"},  # a ramp with equal ends is a step in both cases
}
# Buffers of transformers that no published file has.
ABSENT = {"axk1": "e_score_correction_bias"}
SEEDS = {"axk1": 1, "deepseek_v3_biases": 1, "deepseek_v2": 1, "deepseek_v2_lite": 7, "kimi_k2": 16}

TINY: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "moe_intermediate_size": 12,
    "n_routed_experts": 9,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    # the defaults are outside of this vocabulary
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5}
YARN |= {"original_max_position_embeddings": 16, "mscale": 1.3, "mscale_all_dim": 0.7}


def _tiny(rope: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    return {**TINY, "rope_parameters": rope or {"rope_type": "default", "rope_theta": 50.0}, **changes}


def _v2(rope: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    values = _tiny(rope, model_type="deepseek_v2", norm_topk_prob=False, topk_method="group_limited_greedy")
    del values["num_nextn_predict_layers"]
    return values | {"num_attention_heads": 4, "num_key_value_heads": 4} | changes  # divide hidden_size, as required


def _lite() -> dict[str, Any]:
    one_group: dict[str, Any] = {"n_group": 1, "topk_group": 1, "num_hidden_layers": 2}
    values = _tiny(**one_group, model_type="glm4_moe_lite", mlp_layer_types=["sparse", "dense"])
    return {name: value for name, value in values.items() if name != "first_k_dense_replace"}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    one_group: dict[str, Any] = {"n_group": 1, "topk_group": 1}
    few: dict[str, Any] = {"n_routed_experts": 6, "num_experts_per_tok": 2, "first_k_dense_replace": 0}
    return {
        "deepseek_v3": _tiny(YARN),
        "deepseek_v3_no_latent": _tiny(  # as Moonlight
            **one_group, q_lora_rank=None, norm_topk_prob=False, n_shared_experts=1
        ),
        "deepseek_v3_biases": _tiny(
            attention_bias=True, rope_interleave=False, tie_word_embeddings=True, hidden_act="gelu_pytorch_tanh"
        ),
        "deepseek_v3_dense": _tiny(YARN | {"mscale_all_dim": 1.3}, first_k_dense_replace=3, num_hidden_layers=2),
        "deepseek_v2": _v2(YARN),
        "deepseek_v2_lite": _v2(topk_method="greedy", **one_group, **few, q_lora_rank=None),
        "kimi_k2": _tiny(YARN | {"beta_fast": 1.0, "beta_slow": 1.0}, **one_group, model_type="kimi_k2"),
        "glm4_moe_lite": _lite(),
        "axk1": _lite() | {"model_type": "axk1", "mlp_layer_types": ["dense", "sparse"]},
        "sarvam_mla": _tiny(YARN, **one_group, model_type="sarvam_mla", q_lora_rank=None, num_hidden_layers=2),
    }


def as_published(tensors: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Without the buffers of ABSENT."""
    absent = ABSENT.get(config.model_type)
    return {name: value for name, value in tensors.items() if not (absent and name.endswith(absent))}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published models, in the published dialect."""
    yarn = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
    common: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "ep_size": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "pretraining_tp": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "seq_aux": True,
        "tie_word_embeddings": False,
        "use_cache": True,
        "v_head_dim": 128,
    }
    v3 = common | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "vocab_size": 129280,
    }
    return {
        "deepseek_v3": v3,
        "deepseek_v3_without_mtp": v3 | {"num_nextn_predict_layers": 0},
        "kimi_k2": v3
        | {
            "model_type": "kimi_k2",
            "first_k_dense_replace": 1,
            "max_position_embeddings": 131072,
            "n_group": 1,
            "n_routed_experts": 384,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "num_nextn_predict_layers": 0,
            "rope_scaling": v3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0},
            "rope_theta": 50000.0,
            "routed_scaling_factor": 2.827,
            "topk_group": 1,
            "vocab_size": 163840,
        },
        "deepseek_v2": common
        | {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "first_k_dense_replace": 1,
            "hidden_size": 5120,
            "intermediate_size": 12288,
            "moe_intermediate_size": 1536,
            "n_group": 8,
            "n_routed_experts": 160,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_attention_heads": 128,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 60,
            "num_key_value_heads": 128,
            "rope_scaling": yarn | {"mscale": 0.707, "mscale_all_dim": 0.707},
            "routed_scaling_factor": 16.0,
            "scoring_func": "softmax",
            "topk_group": 3,
            "topk_method": "group_limited_greedy",
            "vocab_size": 102400,
        },
    }


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes, selection biases included.

    Published are 671B for V3, plus 11.5B in its MTP module (which on disk also holds copies of embedding and head), 1T
    for Kimi K2 and 236B for V2.
    """
    return {
        "deepseek_v3": 671_026_419_200 + 11_610_068_224,
        "deepseek_v3_without_mtp": 671_026_419_200,
        "kimi_k2": 1_026_408_232_448,
        "deepseek_v2": 235_741_434_880,
    }


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "deepseek-v2-lite": 15_706_484_224,
    "glm-4.7-flash": 29_943_393_920 + 643_706_176,  # the main model and the MTP module
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200 + 11_610_068_224,  # the main model and the MTP module
    "deepseek-r1": 671_026_419_200 + 11_610_068_224,
    "kimi-k2": 1_026_408_232_448,
    "moonlight-16b-a3b": 15_289_021_568 + 2 * 163840 * 2048,  # its paper excludes embedding and head
}

# Fields refused at any changed value: alone they contradict other fields, or no published model has them.
REFUSED = {
    "deepseek_v2": {"head_dim", "mlp_bias", "n_group", "norm_topk_prob"},
    "deepseek_v3": {"n_group", "num_attention_heads", "num_mtp_layers"},
    "glm4_moe_lite": {"num_attention_heads", "num_hidden_layers"},
    "sarvam_mla": {"num_attention_heads", "num_mtp_layers"},
    "axk1": {"num_attention_heads", "num_hidden_layers"},
}

ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")  # as in transformers 5.23

# The published config.json files of presets.
FILES: dict[str, dict[str, Any]] = json.loads("""{
  "glm-4.7-flash": {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "attention_bias": false,
    "attention_dropout": 0.0, "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 1, "hidden_act":
    "silu", "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob":
    true, "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20,
    "num_nextn_predict_layers": 1, "pad_token_id": 154820, "partial_rotary_factor": 1.0, "q_lora_rank": 768,
    "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta":
    1000000, "routed_scaling_factor": 1.8, "tie_word_embeddings": false, "topk_group": 1, "topk_method": "noaux_tc",
    "v_head_dim": 256, "vocab_size": 154880
  }
}""")

_NO_COPY = "no copy is at hand; one that transformers writes is read in test_release_configs.py"
NO_FILE = dict.fromkeys(("sarvam_mla", "axk1"), _NO_COPY)

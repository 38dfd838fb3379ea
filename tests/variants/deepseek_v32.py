"""Tiny configurations of DeepSeek V3.2 and GLM-5, one per variation of their maths; their published sizes."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

# Fields refused at any changed value: alone they contradict other fields, or no published model has them.
REFUSED = {
    "deepseek_v32": {"head_dim", "mlp_bias", "n_group", "num_attention_heads"},
    "glm_moe_dsa": {"head_dim", "mlp_bias", "num_attention_heads", "num_hidden_layers"},
}
SEEDS = {"deepseek_v32": 2, "glm_moe_dsa": 2}
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")  # as in transformers 5.23

TINY: dict[str, Any] = {
    "model_type": "deepseek_v32",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 14,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "index_n_heads": 9,
    "index_head_dim": 11,
    "index_topk": 8,
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
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 4.0, "beta_slow": 0.5}
YARN |= {"original_max_position_embeddings": 16, "mscale": 1.3, "mscale_all_dim": 0.7}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    rest = {"attention_bias": True, "tie_word_embeddings": True, "norm_topk_prob": False, "n_shared_experts": 1}
    rest |= {"hidden_act": "gelu_pytorch_tanh", "rope_parameters": YARN}
    glm = {"model_type": "glm_moe_dsa", "n_group": 1, "topk_group": 1, "n_routed_experts": 8}
    layers = {"indexer_types": ["full", "shared", "full", "shared"], "num_hidden_layers": 4, "first_k_dense_replace": 2}
    return {"deepseek_v32": TINY | rest, "glm_moe_dsa": TINY | glm | layers}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the published models."""
    common: dict[str, Any] = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "index_head_dim": 128,
        "index_topk": 2048,
        "initializer_range": 0.02,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
        "pretraining_tp": 1,
        "qk_rope_head_dim": 64,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "use_cache": True,
    }
    yarn = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}
    v32 = common | {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "hidden_size": 7168,
        "index_n_heads": 64,
        "intermediate_size": 18432,
        "max_position_embeddings": 163840,
        "n_group": 8,
        "num_attention_heads": 128,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_scaling": yarn | {"mscale": 1.0, "mscale_all_dim": 1.0},
        "rope_theta": 10000,
        "topk_group": 4,
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    glm = common | {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "head_dim": 64,
        "hidden_size": 6144,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
        "intermediate_size": 12288,
        "max_position_embeddings": 202752,
        "n_group": 1,
        "num_attention_heads": 64,
        "num_hidden_layers": 78,
        "num_key_value_heads": 64,
        "q_lora_rank": 2048,
        "qk_head_dim": 256,
        "qk_nope_head_dim": 192,
        "rms_norm_eps": 1e-5,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "topk_group": 1,
        "v_head_dim": 256,
        "vocab_size": 154880,
    }
    newer = {
        "head_dim": 192,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": 3,
        "index_topk_freq": 4,
        "indexer_types": ["full" if i < 3 or i % 4 == 2 else "shared" for i in range(78)],
        "max_position_embeddings": 1048576,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    }
    return {"deepseek_v3_2": v32, "glm_5": glm, "glm_5_2": glm | newer}


_INDEXER = 64 * 128 * 1536 + 128 * 7168 + 2 * 128 + 64 * 7168  # of a layer of DeepSeek V3.2
_GLM_INDEXER = 32 * 128 * 2048 + 128 * 6144 + 2 * 128 + 32 * 6144
_GLM_MTP = 9_952_920_576


def sizes() -> dict[str, int]:
    """{name: number of parameters}: DeepSeek V3 with indexers; GLM-5 as transformers counts it, and the rest.

    The rest of GLM-5 is the MTP module and the selection biases of 75 layers. Published as 685B, with the MTP module's
    copies of embedding and head (1.9B), 754B and 753B.
    """
    glm = 743_911_199_232 + 75 * 256 + _GLM_MTP
    return {
        "deepseek_v3_2": 671_026_419_200 + 11_610_068_224 + 62 * _INDEXER,
        "glm_5": glm,
        "glm_5_2": glm - 57 * _GLM_INDEXER,
    }


# Published parameter counts of the presets, with the MTP modules.
TOTALS: dict[str, int | str] = {
    "deepseek-v3.2": 683_501_971_712,
    "glm-5": 753_864_139_008,
    "glm-5.2": 753_329_940_480,
}

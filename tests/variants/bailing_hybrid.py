"""Tiny configurations of Ling 3, one per way in which its maths can differ, and its published sizes."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "bailing_hybrid",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 7,
    "head_dim": 8,  # transformers saves the rotary width under this name
    "num_local_experts": 9,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "num_mtp_layers": 0,
    "kda_lower_bound": -3.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    # the defaults are outside of this vocabulary
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    free = {"kda_safe_gate": False, "q_lora_rank": 14, "short_conv_kernel_size": 3}
    free |= {"layer_types": ["full_attention", "linear_attention"], "num_local_experts": 12}
    names = {"num_local_experts": "num_experts", "n_shared_experts": "num_shared_experts"}  # as published
    names |= {"num_experts_per_tok": "num_experts_per_token", "max_position_embeddings": "model_max_length"}
    names |= {"n_group": "num_expert_group", "num_mtp_layers": "num_nextn_predict_layers"}
    changed = {names.get(n, n): v for n, v in (TINY | free).items()}
    return {"bailing_hybrid": TINY, "bailing_hybrid_free": changed}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published member: the defaults of transformers 5.24."""
    return {"ling_3.0_flash": {"model_type": "bailing_hybrid", "architectures": ["BailingHybridForCausalLM"]}}


def sizes() -> dict[str, int]:
    """{name of a published member: how many parameters it has, selection biases included}."""
    return {"ling_3.0_flash": TOTALS["ling-3.0-flash"]}


_EXPERTS = 513 * 3 * 2560 * 768 + 512 * 2560 + 512
_LATENT = 32 * 192 * 2560 + 576 * 2560 + 512 + 32 * 256 * 512 + 32 * 128 * 2560 + 32 * 2560
# The MTP head has a projection, five norms, latent attention and experts.
TOTALS: dict[str, int] = {"ling-3.0-flash": 124_414_211_552 + 2 * 2560**2 + 5 * 2560 + _LATENT + _EXPERTS}
REFUSED = {
    "bailing_hybrid": {"num_attention_heads", "linear_num_heads", "linear_conv_kernel_dim", "tie_word_embeddings"}
}
SEEDS = {"bailing_hybrid": 1, "bailing_hybrid_free": 19}
SEPARATE = {"packed": "the convolution and the state run on from one document into the next"}
ROUTER = RouterDtypes(param="model", projection="wide", score="wide", output="wide")
NO_FILE = {"bailing_hybrid": "no copy is at hand; one that transformers writes is read in test_release_configs.py"}

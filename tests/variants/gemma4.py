"""Tiny configurations of Gemma 4, one per way in which its maths can differ, and its published sizes."""

from typing import Any

from fnmodels.models.decoder import gemma4
from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "gemma4_text",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "global_head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 0.1,
    "sliding_window": 6,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 67,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    },
}

ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")  # as in transformers 5.23


def variants() -> dict[str, Any]:
    """{name: config.json or Config}: as E2B, with biases, as 26B-A4B, as 31B in the wrapper."""
    types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    small = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": types, "final_logit_softcapping": 6.0}
    small |= {"use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "head_dim": 8}
    small |= {"rms_norm_eps": 1.0}  # scores are not scaled, and with less fp32 gradients are off by more than 1e-5
    same = {"attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
    sparse = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20}
    unified = {name: value for name, value in (TINY | same).items() if "per_layer_input" not in name}
    unified |= {"model_type": "gemma4_unified_text", "head_dim": 8}
    text = {name: value for name, value in (TINY | same).items() if name != "model_type"}
    return {
        "gemma4_text_e": TINY | small,
        "gemma4_text_bias_untied": TINY | {"attention_bias": True, "tie_word_embeddings": False},
        "gemma4_text_moe": TINY | same | sparse,
        "gemma4_unified_text": unified,
        "gemma4_unified_wrapped": gemma4.Config.from_hf({"model_type": "gemma4_unified", "text_config": unified}),
        "gemma4_wrapped": gemma4.Config.from_hf({"model_type": "gemma4", "text_config": text}),
    }


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the dense and the sparse model without per-layer embeddings, in the published wrapper."""
    text = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attention_k_eq_v": True,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "enable_moe_block": False,
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 5376,
        "hidden_size_per_layer_input": 0,
        "initializer_range": 0.02,
        "intermediate_size": 21504,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
        "max_position_embeddings": 262144,
        "model_type": "gemma4_text",
        "moe_intermediate_size": None,
        "num_attention_heads": 32,
        "num_experts": None,
        "num_global_key_value_heads": 4,
        "num_hidden_layers": 60,
        "num_key_value_heads": 16,
        "num_kv_shared_layers": 0,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": 1024,
        "tie_word_embeddings": True,
        "top_k_experts": None,
        "use_bidirectional_attention": "vision",
        "use_cache": True,
        "use_double_wide_mlp": False,
        "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144,
    }
    sparse = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
    sparse |= {"hidden_size": 2816, "intermediate_size": 2112, "num_attention_heads": 16, "num_key_value_heads": 8}
    sparse |= {"num_global_key_value_heads": 2, "num_hidden_layers": 30, "layer_types": text["layer_types"][:30]}
    outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": True}
    outer |= {"image_token_id": 258880, "boi_token_id": 255999, "eoi_token_id": 258882, "video_token_id": 258884}
    outer |= {"vision_config": {"model_type": "gemma4_vision", "hidden_size": 1152}, "audio_config": None}
    return {
        "gemma4_31b": outer | {"text_config": text},
        "gemma4_26b_a4b": outer | {"text_config": text | sparse},
    }


def sizes() -> dict[str, int]:
    """{name: number of parameters of the text model}, published as 30.7B and 25.2B; layer scalars included."""
    return {"gemma4_31b": 30_697_345_340, "gemma4_26b_a4b": 25_233_141_790}


_EXPERTS = {"num_experts", "num_experts_per_tok", "moe_intermediate_size"}
_SMALL = {"use_double_wide_mlp", "vocab_size_per_layer_input"}
BLIND = {"gemma4_text_e": _EXPERTS, "gemma4_text_moe": _SMALL}
BLIND |= dict.fromkeys(("gemma4_text_bias_untied", "gemma4_wrapped"), _EXPERTS | _SMALL)
BLIND |= dict.fromkeys(("gemma4_unified_text", "gemma4_unified_wrapped"), _EXPERTS | _SMALL)
SEEDS = {"gemma4_text_moe": 11}
NO_FILE = {"gemma4_text": "published within gemma4's text_config"}
NO_FILE |= {"gemma4_unified": "the published file is not at hand; these are the defaults of transformers"}
NO_FILE |= {"gemma4_unified_text": "published within gemma4_unified's text_config"}
# transformers makes the last layer full whatever the list says; here such a list is refused.
REFUSED = {kind: {"layer_types"} for kind in ("gemma4_text", "gemma4_unified_text")}

# Of the text models, as transformers' own add up to.
TOTALS: dict[str, int | str] = {
    "gemma-4-e2b-text": 4_628_569_379,
    "gemma-4-e4b-text": 7_463_013_418,
    "gemma-4-31b-text": 30_697_345_340,
    "gemma-4-26b-a4b-text": 25_233_141_790,
}

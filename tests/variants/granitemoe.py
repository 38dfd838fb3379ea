"""Tiny configurations of Granite 3 MoE, with and without a shared expert, and its published size."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "granitemoe",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.7,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    shared = {"model_type": "granitemoeshared", "shared_intermediate_size": 12, "attention_bias": True}
    windows = {"model_type": "granitemoe_swa", "shared_intermediate_size": 12, "sliding_window": 5}
    windows |= {"layer_types": ["full_attention", "sliding_attention"], "layer_rope_theta": [0, 20.0]}
    tied = shared | {"tie_word_embeddings": True}
    return {"granitemoe": TINY, "granitemoeshared": TINY | tied, "granitemoe_swa": TINY | windows}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of the largest published model, in the published dialect."""
    return {
        "granite_3_0_3b_a800m": {
            "architectures": ["GraniteMoeForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.1,
            "attention_multiplier": 0.015625,
            "bos_token_id": 0,
            "embedding_multiplier": 12.0,
            "eos_token_id": 0,
            "hidden_act": "silu",
            "hidden_size": 1536,
            "initializer_range": 0.02,
            "intermediate_size": 512,
            "logits_scaling": 6.0,
            "max_position_embeddings": 4096,
            "model_type": "granitemoe",
            "num_attention_heads": 24,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 40,
            "output_router_logits": False,
            "pad_token_id": 0,
            "residual_multiplier": 0.22,
            "rms_norm_eps": 1e-6,
            "rope_scaling": None,
            "rope_theta": 10000,
            "router_aux_loss_coef": 0.001,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "use_cache": True,
            "vocab_size": 49155,
        }
    }


def sizes() -> dict[str, int]:
    """{name: number of parameters}, counted by hand from the shapes; published as 3.3B."""
    attention = 2 * 1536 * 1536 + 2 * 1536 * 512
    layer = attention + 40 * 3 * 1536 * 512 + 40 * 1536 + 2 * 1536
    return {"granite_3_0_3b_a800m": 49155 * 1536 + 32 * layer + 1536}


ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="model")  # as in transformers 5.24
SEEDS = {"granitemoe": 2, "granitemoeshared": 3}

TOTALS: dict[str, int | str] = {"granite-3.0-1b-a400m": "1.3B", "granite-3.0-3b-a800m": 3_298_793_472}

REFUSED = {
    "granitemoe_swa": {"layer_types", "layer_rope_theta", "num_hidden_layers"}
}  # a theta for each type of layers
BLIND = {name: {"local_rope.theta", "local_rope.partial"} for name in ("granitemoe", "granitemoeshared")} | {
    "granitemoe_swa": {"rope.theta", "rope.partial"}
}

NO_FILE = dict.fromkeys(
    ("granitemoe_swa", "granitemoeshared"),
    "no copy is at hand; one that transformers writes is read in test_release_configs.py",
)

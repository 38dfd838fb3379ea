"""Tiny configurations of MiniMax-Text-01, one per variation of its maths, and its published size."""

from typing import Any

from fnmodels.ops.moe.router import RouterDtypes

TINY: dict[str, Any] = {
    "model_type": "minimax",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "block_size": 7,
    "full_attn_alpha_factor": 1.3,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 1.6,
    "linear_attn_beta_factor": 0.7,
    "mlp_alpha_factor": 1.2,
    "mlp_beta_factor": 0.9,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ROUTER = RouterDtypes(param="model", projection="model", score="wide", output="wide")
# Buffers, which follow from the config.
LEFT_OUT = {"minimax": (".slope_rate", ".query_decay", ".key_decay", ".diagonal_decay")}
SEEDS = {"minimax": 1}
SEPARATE = {"packed": "the state runs on from one document into the next"}


def as_published(state: dict[str, Any], config: Any) -> dict[str, Any]:
    """Without the buffers, which loading leaves out."""
    return {name: tensor for name, tensor in state.items() if not name.endswith(LEFT_OUT["minimax"])}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    return {"minimax": TINY}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json} of Text-01 as transformers has it, and of M1 as it was published."""
    sizes = {"vocab_size": 200064, "hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80}
    sizes |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 32}
    types = ["full_attention" if (i + 1) % 8 == 0 else "linear_attention" for i in range(80)]
    factors = {f"{part}_beta_factor": 1.0 for part in ("full_attn", "linear_attn", "mlp")}
    factors |= {f"{part}_alpha_factor": 3.5565588200778455 for part in ("full_attn", "linear_attn", "mlp")}
    own = {"architectures": ["MiniMaxForCausalLM"], "block_size": 256, "rms_norm_eps": 1e-5, "rope_theta": 1e7}
    own |= {"rotary_dim": 64, "postnorm": True, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid"}
    own |= {"max_position_embeddings": 10240000, "layer_types": types, "num_experts_per_tok": 2, "use_cache": True}
    own |= {"attention_dropout": 0.0, "router_jitter_noise": 0.0, "sliding_window": None, "hidden_act": "silu"}
    own |= {"attn_type_list": [1 if (i + 1) % 8 == 0 else 0 for i in range(80)], "output_router_logits": False}
    text_01 = {"model_type": "minimax"} | sizes | factors | own
    return {"minimax_text_01": text_01, "minimax_m1": as_remote_code(text_01, "minimax_m1", "MiniMaxM1ForCausalLM")}


def as_remote_code(values: dict[str, Any], model_type: str, architecture: str) -> dict[str, Any]:
    """A config.json in the dialect of the publisher's own code."""
    kept = {name: value for name, value in values.items() if name not in ("layer_types", "block_size")}
    for part, theirs in {"full_attn": "full_attention", "linear_attn": "linear_attention", "mlp": "mlp"}.items():
        for end in ("alpha", "beta"):
            kept[f"layernorm_{theirs}_{end}"] = kept.pop(f"{part}_{end}_factor")
    kinds = [1 if kind == "full_attention" else 0 for kind in values["layer_types"]]
    own = {"model_type": model_type, "architectures": [architecture], "attn_type_list": kinds, "postnorm": True}
    return kept | own | {"auto_map": {"AutoConfig": "configuration.Config"}, "transformers_version": "4.45.2"}


def sizes() -> dict[str, int]:
    """{name of the published model: its number of parameters}."""
    return {"minimax_text_01": 456_089_655_296, "minimax_m1": 456_089_655_296}


TOTALS: dict[str, int | str] = {"minimax-text-01": 456_089_655_296}
NO_FILE = {"minimax_text_01": "as that of minimax_m1 but for its names: tests/fnmodels/models/test_minimax.py"}
REFUSED = {"minimax": {"router_jitter_noise", "sliding_window"}}

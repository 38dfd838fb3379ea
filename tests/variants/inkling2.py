"""Tiny configurations of Inkling 2's text and of its loops, one per way in which its maths can differ."""

from typing import Any

from fnmodels.models.decoder import inkling2
from fnmodels.ops.moe.router import RouterDtypes

ROUTER = RouterDtypes(param="wide", projection="wide", score="wide", output="wide")
SEPARATE = {
    "packed": "the convolutions run on from one document into the next",
    "left": "the logarithmic scale of queries counts padding",
}
REFUSED = {
    "inkling2_text": {"hidden_act", "scoring_func"},
    "inkling2_loop_text": {"hidden_act", "scoring_func", "loop_layer_index_end"},  # within a block
}
TRAINING_TOLERANCE = {"inkling2_loop_deep": 1e-8}  # of fp64: errors grow with ten passes
SEEDS = {"inkling2_short": 1, "inkling2_loop": 6, "inkling2_loop_deep": 10}
NO_FILE = dict.fromkeys(
    ("inkling2_text", "inkling2", "inkling2_loop_text", "inkling2_loop"),
    "no copy is at hand; those that transformers writes are read in test_release_configs.py",
)
WIDE_LOGITS = {"inkling2_text", "inkling2", "inkling2_loop_text", "inkling2_loop"}

TINY: dict[str, Any] = {
    "model_type": "inkling2_text",
    "vocab_size": 64,
    "unpadded_vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 6,
    "sliding_window_size": 6,
    "d_rel": 3,
    "rel_extent": 9,
    "log_scaling_n_floor": 4,
    "log_scaling_alpha": 0.6,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid"],
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "conv_kernel_size": 3,
    "moe_intermediate_size": 20,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "route_scale": 1.4,
    "qk_l2_clip_threshold": 2.0,
    "rel_l2_clip_threshold": 1.2,
    "n_layers_per_attn_res_block": 2,
    "mlp_gate_softcap": 1.5,
    "mlp_up_softcap": 2.5,
    "final_logit_softcapping": 4.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# eps 1 and a smaller route_scale: errors of fp32 grow with the passes
LOOP: dict[str, Any] = TINY | {
    "model_type": "inkling2_loop_text",
    "num_hidden_layers": 4,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "n_layers_per_attn_res_block": 1,
    "rms_norm_eps": 1.0,
    "route_scale": 0.7,
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 3,
    "loop_num_passes": 3,
    "loop_gate_rank": 2,
}


def variants() -> dict[str, Any]:
    """{name: config.json or Config}."""
    other = {"layer_types": ["hybrid", "hybrid_sliding"], "num_hidden_layers": 2, "n_layers_per_attn_res_block": 1}
    other |= {"conv_kernel_size": 2, "num_key_value_heads": 4, "swa_num_key_value_heads": 3, "vocab_size": 61}
    deep = {"num_hidden_layers": 6, "layer_types": ["hybrid_sliding", "hybrid"] * 3, "n_layers_per_attn_res_block": 2}
    deep |= {"n_routed_experts": 3, "loop_layer_index_start": 2, "loop_layer_index_end": 6, "loop_num_passes": 2}

    def wrapped(model_type: str, values: dict[str, Any]) -> inkling2.Config:
        text = {name: value for name, value in values.items() if name != "model_type"}
        return inkling2.Config.from_hf({"model_type": model_type, "text_config": text})

    return {
        "inkling2": TINY,
        "inkling2_short": TINY | other,
        "inkling2_wrapped": wrapped("inkling2", TINY),
        "inkling2_loop": LOOP,
        "inkling2_loop_wrapped": wrapped("inkling2_loop", LOOP),
        "inkling2_loop_deep": LOOP | deep,
    }


_SHARED: dict[str, Any] = {"vocab_size": 201024, "unpadded_vocab_size": 200058, "num_key_value_heads": 8}
_SHARED |= {"head_dim": 128, "swa_num_key_value_heads": 8, "swa_head_dim": 128, "sliding_window_size": 1024}
_SHARED |= {"d_rel": 16, "rel_extent": 1024, "log_scaling_alpha": 0.1, "max_position_embeddings": 1048576}
_SHARED |= {"rms_norm_eps": 1e-06, "conv_kernel_size": 4, "hidden_act": "silu", "num_experts_per_tok": 8}
_SHARED |= {"route_scale": 8.0, "qk_l2_clip_threshold": 22.627416997969522, "rel_l2_clip_threshold": 8.0}
_SHARED |= {"n_layers_per_attn_res_block": 6, "mlp_gate_softcap": 4.0, "mlp_up_softcap": 25.0}
_SHARED |= {"final_logit_softcapping": 30.0, "scoring_func": "sigmoid", "eos_token_id": 200006}


def published() -> dict[str, dict[str, Any]]:
    """{name: config.json}: the defaults of transformers 5.24, which are those of the models that it names."""

    def model(layers: int, heads: int, **sizes: Any) -> dict[str, Any]:
        types = ["hybrid" if (i + 1) % 6 == 0 else "hybrid_sliding" for i in range(layers)]
        own = {"num_hidden_layers": layers, "layer_types": types}
        return _SHARED | own | {"num_attention_heads": heads, "swa_num_attention_heads": heads} | sizes

    small: dict[str, Any] = {"hidden_size": 4608, "moe_intermediate_size": 2304, "n_routed_experts": 384}
    small |= {"log_scaling_n_floor": 128000, "architectures": ["Inkling2ForCausalLM"], "model_type": "inkling2_text"}
    mini: dict[str, Any] = {"hidden_size": 2304, "moe_intermediate_size": 1152, "n_routed_experts": 128}
    mini |= {"log_scaling_n_floor": 8192, "architectures": ["Inkling2LoopForCausalLM"]}
    mini |= {"model_type": "inkling2_loop_text", "loop_layer_index_start": 6, "loop_layer_index_end": 18}
    mini |= {"loop_num_passes": 3, "loop_gate_rank": 64}
    return {"inkling_2_small": model(48, 48, **small), "inkling_2_mini": model(24, 24, **mini)}


def _size(D: int, layers: int, heads: int, inner: int, experts: int, looped: int = 0) -> int:
    """The number of parameters, counted from the shapes."""
    attention = D * 128 * (3 * heads + 2 * 8) + heads * (D + 16 * D + 128 + 16) + 16 * 1024
    sliding, full = attention + 2 * 1024 * 4, attention + 2 * (4 * 1024 + 4 * 8 * D)
    mlp = 3 * experts * inner * D + experts * D + experts
    around = 2 * 4 * D + D + D  # convolutions, a norm and a query of the MLP
    total = layers * (mlp + around) + layers // 6 * (full + 3 * D + 3 * D) + layers * 5 // 6 * (sliding + 2 * D) - D
    gates = looped * (4 * (2 * D * 64 + 2 * D * 64) + 4 * D)
    return total + gates + D + D + D + (201024 + 200058) * D


def sizes() -> dict[str, int]:
    """{name: number of parameters}."""
    return {"inkling_2_small": _size(4608, 48, 48, 2304, 384), "inkling_2_mini": _size(2304, 24, 24, 1152, 128, 12)}


TOTALS: dict[str, int | str] = {
    "inkling-2-small": sizes()["inkling_2_small"],
    "inkling-2-mini": sizes()["inkling_2_mini"],
}

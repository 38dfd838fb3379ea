"""Architectures of GGUF files of Mamba's layers, alone or beside attention; `-exp(A_log)` is what they store."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.models.common.config_json import ConfigJson

from .architecture import LAYER, TOP, Architecture, To
from .header import GgufFile
from .hybrid import a_log, filters, flat
from .metadata import Metadata, rms_epsilon, vocabulary
from .routed import experts

_BACKBONE = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_ENDS = {"ssm_in": "in_proj", "ssm_out": "out_proj", "ssm_conv1d.bias": "conv1d.bias"}


def _logs(tensors: Sequence[Tensor]) -> Tensor:
    """Decays of each channel and number of its state."""
    return torch.log(-tensors[0])


def _second(mixer: str) -> dict[str, str | To]:
    """Names of Mamba 2's tensors, which the file has as matrices of one column."""
    return {
        **{name: f"{mixer}.{inner}" for name, inner in _ENDS.items()},
        "ssm_conv1d.weight": To(f"{mixer}.conv1d.weight", filters),
        "ssm_dt.bias": f"{mixer}.dt_bias",
        "ssm_a": To(f"{mixer}.A_log", a_log),
        "ssm_d": To(f"{mixer}.D", flat),
        "ssm_norm.weight": To(f"{mixer}.norm.weight", flat),
    }


def _first(mixer: str) -> dict[str, str | To]:
    """Names of Mamba 1's tensors."""
    return {
        **{name: f"{mixer}.{inner}" for name, inner in _ENDS.items()},
        "ssm_conv1d.weight": To(f"{mixer}.conv1d.weight", filters),
        "ssm_x": f"{mixer}.x_proj",
        "ssm_dt": f"{mixer}.dt_proj",
        "ssm_a": To(f"{mixer}.A_log", _logs),
        "ssm_d": f"{mixer}.D",
        "ssm_dt_norm": f"{mixer}.dt_layernorm",
        "ssm_b_norm": f"{mixer}.b_layernorm",
        "ssm_c_norm": f"{mixer}.c_layernorm",
    }


def _without_heads(metadata: Metadata, epsilon: str) -> ConfigJson:
    """The fields of a model without attention; the converter writes its lengths and heads as placeholders."""
    metadata.expect("attention.head_count", 0)
    metadata.expect("feed_forward_length", 0)
    metadata.take("context_length")
    return {
        "hidden_size": metadata.integer("embedding_length"),
        "num_hidden_layers": metadata.layers,
        "expand": _quotient(metadata, "ssm.inner_size", metadata.integer("embedding_length")),
        "state_size": metadata.integer("ssm.state_size"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "layer_norm_epsilon": metadata.number(epsilon),
        **vocabulary(metadata),
    }


def _quotient(metadata: Metadata, key: str, divisor: int) -> int:
    value = metadata.integer(key)
    if value % divisor:
        raise UnsupportedError(
            f"{metadata.path}: '{metadata.architecture}.{key}' is {value}, which {divisor} does not divide."
        )
    return value // divisor


def _mamba(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """Falcon Mamba normalizes what the state reads."""
    falcon = metadata.switch("ssm.dt_b_c_rms")
    return {
        "model_type": "falcon_mamba" if falcon else "mamba",
        "time_step_rank": metadata.integer("ssm.time_step_rank"),
    }


def _mamba2(metadata: Metadata, file: GgufFile) -> ConfigJson:
    heads = metadata.integer("ssm.time_step_rank")
    return {
        "num_heads": heads,
        "head_dim": _quotient(metadata, "ssm.inner_size", heads),
        "n_groups": metadata.integer("ssm.group_count"),
    }


def _every(name: str, flags: Sequence[bool], metadata: Metadata) -> ConfigJson:
    """The fields of layers that come once in a period. UnsupportedError for other patterns."""
    chosen = [i for i, flag in enumerate(flags) if flag]
    if not chosen:
        return {f"{name}_period": len(flags) + 1, f"{name}_offset": len(flags)}
    offset = chosen[0]
    period = chosen[1] - offset if len(chosen) > 1 else len(flags)
    if offset >= period or chosen != list(range(offset, len(flags), period)):
        raise UnsupportedError(f"{metadata.path}: its layers {chosen} are not every nth one; only such are read.")
    return {f"{name}_period": period, f"{name}_offset": offset}


def _jamba(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """Layers without heads of keys are Mamba's; those with experts have a router."""
    heads, layers = metadata.each_layer("attention.head_count_kv"), range(metadata.layers)
    metadata.put("attention.head_count_kv", max(heads))
    return {
        **_every("attn_layer", [count > 0 for count in heads], metadata),
        **_every("expert_layer", [f"blk.{i}.ffn_gate_inp.weight" in file.tensors for i in layers], metadata),
        "num_experts": metadata.integer("expert_count", 1),
        "num_experts_per_tok": metadata.integer("expert_used_count", 1),
        "mamba_expand": _quotient(metadata, "ssm.inner_size", metadata.integer("embedding_length")),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_dt_rank": metadata.integer("ssm.time_step_rank"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
    }


def _falcon_h1(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """The converter multiplies weights by the model's multipliers, so that these are 1 here."""
    inner, heads = metadata.integer("ssm.inner_size"), metadata.integer("ssm.time_step_rank")
    return {
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": _quotient(metadata, "ssm.inner_size", heads),
        "mamba_n_groups": metadata.integer("ssm.group_count"),
        "mamba_d_state": metadata.integer("ssm.state_size"),
        "mamba_d_conv": metadata.integer("ssm.conv_kernel"),
    }


def _nemotron_h(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """A layer is attention where it has heads of keys, an MLP or experts where it has their width, else Mamba 2."""
    keys, widths = metadata.each_layer("attention.head_count_kv"), metadata.each_layer("feed_forward_length")
    rms_epsilon(metadata)
    sparse = metadata.architecture.endswith("_moe")
    inner = "moe" if sparse else "mlp"
    kinds = [
        "full_attention" if count else inner if width else "linear_attention"
        for count, width in zip(keys, widths, strict=True)
    ]
    metadata.put("attention.head_count_kv", max(keys) or 1)
    metadata.put("feed_forward_length", max(widths) or 1)
    heads = metadata.integer("ssm.time_step_rank")
    fields: ConfigJson = {
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": _quotient(metadata, "ssm.inner_size", heads),
        "n_groups": metadata.integer("ssm.group_count"),
        "ssm_state_size": metadata.integer("ssm.state_size"),
        "conv_kernel": metadata.integer("ssm.conv_kernel"),
        "layer_norm_epsilon": metadata.number("attention.layer_norm_rms_epsilon"),
    }
    metadata.take("rope.dimension_count")  # nothing rotates
    if not sparse:
        for name in ("expert_count", "expert_group_count", "expert_group_used_count"):
            metadata.take(name)  # defaults of transformers, which the converter repeats
    return fields | (_nemotron_experts(metadata) if sparse else {})


def _nemotron_experts(metadata: Metadata) -> ConfigJson:
    metadata.expect("expert_shared_count", 1)
    return {
        "n_routed_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length"),
        "moe_latent_size": metadata.count("moe_latent_size"),
        "n_group": metadata.integer("expert_group_count", 1),
        "topk_group": metadata.integer("expert_group_used_count", 1),
        "norm_topk_prob": metadata.switch("expert_weights_norm"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


_NEMOTRON: dict[str, str | To] = {
    **_second("mixer"),
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_NEMOTRON_H = Architecture(
    {"model_type": "nemotron_h", "mlp_hidden_act": "relu2"},
    _NEMOTRON,
    flags={"use_bias": "ssm_in.bias"},
    more=_nemotron_h,
    without=("rms_norm_eps", "rope_theta", "rope_scaling"),
    with_head_dim=True,
    interleaved=True,  # though nothing rotates
    top=_BACKBONE,
    root="backbone.layers",
)

RECURRENT: Mapping[str, Architecture] = MappingProxyType(
    {
        "mamba": Architecture(
            {},
            _first("mixer") | {"attn_norm": "norm"},
            flags={"use_conv_bias": "ssm_conv1d.bias"},
            more=_mamba,
            base=_without_heads,
            top=_BACKBONE,
            root="backbone.layers",
        ),
        "mamba2": Architecture(
            {"model_type": "mamba2"},
            _second("mixer") | {"attn_norm": "norm"},
            flags={"use_conv_bias": "ssm_conv1d.bias"},
            more=_mamba2,
            base=_without_heads,
            without=("expand",),
            top=_BACKBONE,
            root="backbone.layers",
        ),
        "jamba": Architecture(
            {"model_type": "jamba", "hidden_act": "silu"},
            LAYER
            | experts("feed_forward.router")
            | _first("mamba")
            | {"ffn_norm": "pre_ff_layernorm"}
            | {f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
            more=_jamba,
            without=("rope_theta", "rope_scaling"),
            top=TOP | {"output_norm": "model.final_layernorm"},
        ),
        "falcon-h1": Architecture(
            # llama.cpp normalizes behind the gate, in models that have this norm
            {"model_type": "falcon_h1", "hidden_act": "silu", "mamba_norm_before_gate": False},
            LAYER
            | _second("mamba")
            | dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "pre_ff_layernorm.weight")  # the first is the converter's
            | {f"ffn_{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
            flags={"mamba_rms_norm": "ssm_norm.weight", "mamba_conv_bias": "ssm_conv1d.bias"},
            more=_falcon_h1,
            with_head_dim=True,
            top=TOP | {"output_norm": "model.final_layernorm"},
        ),
        "nemotron_h": _NEMOTRON_H,
        "nemotron_h_moe": _NEMOTRON_H,
    }
)

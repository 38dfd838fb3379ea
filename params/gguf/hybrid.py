"""Architectures of GGUF files of which most layers keep a state in place of attention."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import ConfigError
from fnmodels.models.common.config_json import ConfigJson

from .architecture import LAYER, Architecture, Names, To
from .dense import GRANITE
from .header import GgufFile
from .metadata import Metadata, scaled_rope
from .routed import GRANITE_MOE, QWEN, experts

_SILU = {"hidden_act": "silu"}


def as_it_is(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor, from which no offset is subtracted."""
    return tensors[0]


def a_log(tensors: Sequence[Tensor]) -> Tensor:
    """Decays, of which the file has -exp."""
    return torch.log(-tensors[0]).flatten()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].flatten()


def filters(tensors: Sequence[Tensor]) -> Tensor:
    """A filter for each channel, with the dimension of its one input."""
    return tensors[0].unsqueeze(1)


def _by_key(tensor: Tensor, keys: int, size: int) -> Tensor:
    """Rows of heads of values in the order of the keys that they share; the file has the first of each key first."""
    return tensor.reshape(-1, keys, size, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)


def _rows(tensors: Sequence[Tensor], keys: int, size: int) -> Tensor:
    return _by_key(tensors[0], keys, size)


def _columns(tensors: Sequence[Tensor], keys: int, size: int) -> Tensor:
    return _by_key(tensors[0].T, keys, size).T


def _last_rows(tensors: Sequence[Tensor], keys: int, size: int, before: int) -> Tensor:
    """Rows of queries and keys as they are, then those of values."""
    return torch.cat((tensors[0][:before], _by_key(tensors[0][before:], keys, size)))


def _decays(tensors: Sequence[Tensor], keys: int) -> Tensor:
    return _by_key(torch.log(-tensors[0]), keys, 1)


def _filters(tensors: Sequence[Tensor], keys: int, size: int, before: int) -> Tensor:
    return _last_rows(tensors, keys, size, before).unsqueeze(1)


def _delta(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """Sizes of gated delta rules, and which layers have them."""
    metadata.expect("nextn_predict_layers", 0)
    metadata.take("full_attention_interval")  # which the tensors show
    heads, inner = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    if inner % heads:
        raise ConfigError(f"{metadata.path}: 'ssm.inner_size' is {inner}, which {heads} heads do not divide.")
    linear = [f"blk.{i}.ssm_a" in file.tensors for i in range(metadata.layers)]
    fields: ConfigJson = {
        "linear_num_key_heads": metadata.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": metadata.integer("ssm.state_size"),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": metadata.integer("ssm.conv_kernel"),
        "layer_types": ["linear_attention" if is_linear else "full_attention" for is_linear in linear],
    }
    turned = metadata.integer("rope.dimension_count", metadata.head_dim)
    rope = scaled_rope(metadata) | {"partial_rotary_factor": turned / metadata.head_dim}
    if sections := metadata.take("rope.dimension_sections"):
        rope |= {"mrope_section": sections[:3], "mrope_interleaved": True}
    return fields | {"rope_parameters": rope}


_ROPE = ("rope_theta", "rope_scaling")  # stand in rope_parameters
_QWEN_NORMS = {"post_attention_norm": "post_attention_layernorm"}
_QWEN_EXPERTS = experts("mlp.gate", "mlp.shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_QWEN_COUNTS = QWEN | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_DELTA: dict[str, str | To] = {
    "ssm_norm.weight": To("linear_attn.norm.weight", as_it_is),
    "ssm_out": "linear_attn.out_proj",
}


def _next_names(values: Mapping[str, Any]) -> Names:
    """Qwen 3 Next has the rows of q, k, v and z of each key together."""
    keys, per_key = values["linear_num_key_heads"], values["linear_num_value_heads"] // values["linear_num_key_heads"]
    sizes = (values["linear_key_head_dim"], per_key * values["linear_value_head_dim"])

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        (queries, others), gate = tensors[0].split((keys * sizes[0], keys * sum(sizes))), tensors[1]
        parts = (queries, *others.split((keys * sizes[0], keys * sizes[1])), gate)
        return torch.cat([part.view(keys, -1, part.shape[1]) for part in parts], 1).flatten(0, 1)

    both = To("linear_attn.in_proj_qkvz.weight", joined)
    return {
        **_DELTA,
        "attn_qkv.weight": both,
        "attn_gate.weight": both,
        "ssm_ba": "linear_attn.in_proj_ba",
        "ssm_a": To("linear_attn.A_log", a_log),
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_conv1d.weight": To("linear_attn.conv1d.weight", filters),
    }


def _delta_names(values: Mapping[str, Any]) -> Names:
    """Qwen 3.5's tensors one by one, whose heads of values the file has in another order."""
    keys, size = values["linear_num_key_heads"], values["linear_value_head_dim"]
    before = 2 * keys * values["linear_key_head_dim"]
    by_head = partial(_rows, keys=keys, size=1)
    return {
        "ssm_norm.weight": To("linear_attn.norm.weight", as_it_is),
        "ssm_out.weight": To("linear_attn.out_proj.weight", partial(_columns, keys=keys, size=size)),
        "attn_qkv.weight": To(
            "linear_attn.in_proj_qkv.weight", partial(_last_rows, keys=keys, size=size, before=before)
        ),
        "attn_gate.weight": To("linear_attn.in_proj_z.weight", partial(_rows, keys=keys, size=size)),
        "ssm_alpha.weight": To("linear_attn.in_proj_a.weight", by_head),
        "ssm_beta.weight": To("linear_attn.in_proj_b.weight", by_head),
        "ssm_dt.bias": To("linear_attn.dt_bias", by_head),
        "ssm_a": To("linear_attn.A_log", partial(_decays, keys=keys)),
        "ssm_conv1d.weight": To("linear_attn.conv1d.weight", partial(_filters, keys=keys, size=size, before=before)),
    }


def _delta_experts(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """The fields of models whose layers all have experts."""
    metadata.put("feed_forward_length", metadata.integer("expert_feed_forward_length"))
    return _delta(metadata, file)


def _granite(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """Layers without heads of keys are Mamba 2's."""
    heads = metadata.each_layer("attention.head_count_kv")
    metadata.put("attention.head_count_kv", max(heads))
    states, inner = metadata.integer("ssm.time_step_rank"), metadata.integer("ssm.inner_size")
    rotates = metadata.take("rope.scaling.finetuned", False)
    ends = {name.partition(".")[2].partition(".")[2] for name in file.tensors}
    return {
        "layer_types": ["full_attention" if attends else "linear_attention" for attends in heads],
        "mamba_n_heads": states,
        "mamba_d_head": inner // states,
        "mamba_expand": inner // metadata.integer("embedding_length"),
        "mamba_proj_bias": "ssm_in.bias" in ends,
        "mamba_conv_bias": "ssm_conv1d.bias" in ends,
        "attention_bias": "attn_q.bias" in ends,
        "position_embedding_type": "rope" if rotates else None,
    }


_MAMBA: dict[str, str | To] = {
    "ssm_in": "mamba.in_proj",
    "ssm_out": "mamba.out_proj",
    "ssm_norm.weight": To("mamba.norm.weight", flat),
    "ssm_conv1d.weight": To("mamba.conv1d.weight", filters),
    "ssm_conv1d.bias": "mamba.conv1d.bias",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": To("mamba.A_log", a_log),
    "ssm_d": To("mamba.D", flat),
    # models without experts have the shared one alone
    "ffn_gate": "shared_mlp.input_linear",
    "ffn_up": "shared_mlp.input_linear",
    "ffn_down": "shared_mlp.output_linear",
}

_NO_HEADS = {"mtp_num_hidden_layers": 0}  # GGUF files of these have no MTP head

HYBRID: Mapping[str, Architecture] = MappingProxyType(
    {
        "qwen3next": Architecture(
            {"model_type": "qwen3_next", "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
            | _SILU
            | _NO_HEADS,
            LAYER | _QWEN_NORMS | _QWEN_EXPERTS,
            _QWEN_COUNTS,
            more=_delta,
            without=_ROPE,
            with_head_dim=True,
            norm_offset=1.0,
            sized=_next_names,
        ),
        "qwen35": Architecture(
            {"model_type": "qwen3_5_text"} | _SILU | _NO_HEADS,
            LAYER | _QWEN_NORMS,
            more=_delta,
            without=_ROPE,
            with_head_dim=True,
            norm_offset=1.0,
            sized=_delta_names,
        ),
        "qwen35moe": Architecture(
            {"model_type": "qwen3_5_moe_text"} | _SILU | _NO_HEADS,
            LAYER | _QWEN_NORMS | _QWEN_EXPERTS,
            _QWEN_COUNTS,
            more=_delta_experts,
            without=(*_ROPE, "intermediate_size"),
            with_head_dim=True,
            norm_offset=1.0,
            sized=_delta_names,
        ),
        "granitehybrid": Architecture(
            {"model_type": "granitemoehybrid"} | _SILU,
            LAYER | GRANITE_MOE | _MAMBA,
            {
                "num_local_experts": "expert_count",
                "num_experts_per_tok": "expert_used_count",
                "shared_intermediate_size": "expert_shared_feed_forward_length",
                "mamba_n_groups": "ssm.group_count",
                "mamba_d_state": "ssm.state_size",
                "mamba_d_conv": "ssm.conv_kernel",
            },
            GRANITE,
            more=_granite,
            interleaved=True,
        ),
    }
)

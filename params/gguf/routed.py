"""Architectures of GGUF files whose layers have experts."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from fnmodels.models.common.config_json import ConfigJson

from .architecture import LAYER, Architecture, To, rows
from .dense import (
    GRANITE,
    HUNYUAN,
    IN_ROPE,
    LFM2,
    LFM2_TOP,
    hunyuan,
    lfm2,
    partial_rotary,
    phi_longrope,
    sliding_layers,
    vision_rope,
)
from .header import GgufFile
from .metadata import Metadata, rope_scaling

_SILU = {"hidden_act": "silu"}
SOFTMAX, SIGMOID = 1, 2  # of 'expert_gating_func'
_STACKED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_SHARED = {"ffn_gate_shexp": "gate_proj", "ffn_up_shexp": "up_proj", "ffn_down_shexp": "down_proj"}


def experts(router: str = "mlp.gate", shared: str = "", bias: str = "") -> dict[str, str]:
    """Names of a router, of experts one by one beside it, of a shared expert, and of the bias of the choice."""
    before = router.partition(".")[0]
    names = {"ffn_gate_inp": router} | {name: f"{before}.experts.{{}}.{inner}" for name, inner in _STACKED.items()}
    names |= {name: f"{shared}.{inner}" for name, inner in _SHARED.items()} if shared else {}
    return names | ({"exp_probs_b.bias": bias} if bias else {})


def _llama(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """Mixtral is of this architecture too, with experts."""
    if "blk.0.ffn_gate_inp.weight" in file.tensors:
        counts = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
        return {"model_type": "mixtral"} | {name: metadata.integer(key) for name, key in counts.items()}
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}


_MIXTRAL = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
QWEN = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": []}
# Fields of GLM 4.5 and of what follows DeepSeek V3's choice of experts in groups.
GROUPED = {
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": "leading_dense_block_count",
}


def _grouped(metadata: Metadata) -> ConfigJson:
    """`choice` by scores that are sigmoids."""
    metadata.expect("expert_gating_func", SIGMOID)
    return choice(metadata)


def choice(metadata: Metadata) -> ConfigJson:
    """The choice among groups of experts, and the scale of their sum."""
    return {
        "n_group": metadata.count("expert_group_count") or 1,
        "topk_group": metadata.count("expert_group_used_count") or 1,
        "norm_topk_prob": metadata.switch("expert_weights_norm"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
    }


def _glm4_moe(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """The layers of the MTP head are counted among the others."""
    heads = metadata.count("nextn_predict_layers")
    fields = {"num_nextn_predict_layers": heads, "num_hidden_layers": metadata.layers - heads}
    return fields | _grouped(metadata) | partial_rotary(metadata, file)


_MTP = {
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}


def _dots1(metadata: Metadata, file: GgufFile) -> ConfigJson:
    return {"sliding_window": None, **_grouped(metadata)}


def _exaone_moe(metadata: Metadata, file: GgufFile) -> ConfigJson:
    metadata.expect("nextn_predict_layers", 0)
    metadata.take("expert_shared_feed_forward_length")  # the product of two others
    dense = metadata.count("leading_dense_block_count")
    kinds = ["dense"] * dense + ["sparse"] * (metadata.layers - dense)
    fields: ConfigJson = {"mlp_layer_types": kinds, "num_nextn_predict_layers": 0}
    return {**fields, **_grouped(metadata), **sliding_layers(metadata)}


def _ernie_moe(metadata: Metadata, file: GgufFile) -> ConfigJson:
    metadata.take("expert_shared_feed_forward_length")  # the product of two others
    return {"moe_layer_end_index": metadata.layers - 1}


def _row(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].reshape(1, -1)


def _afmoe(metadata: Metadata, file: GgufFile) -> ConfigJson:
    # llama.cpp knows no other pattern for it.
    kinds = ["sliding_attention" if (i + 1) % 4 else "full_attention" for i in range(metadata.layers)]
    metadata.expect("expert_gating_func", SIGMOID)
    return {"layer_types": kinds, "sliding_window": metadata.integer("attention.sliding_window")}


def _granite_moe(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """With a shared expert, it is another model type."""
    shared = metadata.count("expert_shared_feed_forward_length")
    return {"model_type": "granitemoeshared", "shared_intermediate_size": shared} if shared else {}


GRANITE_MOE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.input_linear",
    "ffn_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
    "ffn_gate_shexp": "shared_mlp.input_linear",
    "ffn_up_shexp": "shared_mlp.input_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}


def _columns(tensors: Sequence[Tensor]) -> Tensor:
    """Experts that multiply from the right."""
    return rows(tensors).transpose(-1, -2)


def _pairs(tensors: Sequence[Tensor]) -> Tensor:
    """Rows of two matrices in turn, as columns."""
    return torch.stack(list(tensors), 2).flatten(1, 2).transpose(-1, -2)


def _pairs_of_biases(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors), 2).flatten(1, 2)


_GPT_OSS: dict[str, str | To] = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_sinks.weight": "self_attn.sinks",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.weight": To("mlp.experts.gate_up_proj", _pairs),
    "ffn_gate_exps.bias": To("mlp.experts.gate_up_proj_bias", _pairs_of_biases),
    "ffn_up_exps.weight": To("mlp.experts.gate_up_proj", _pairs),
    "ffn_up_exps.bias": To("mlp.experts.gate_up_proj_bias", _pairs_of_biases),
    "ffn_down_exps.weight": To("mlp.experts.down_proj", _columns),
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}


def _gpt_oss(metadata: Metadata, file: GgufFile) -> ConfigJson:
    metadata.take("feed_forward_length")
    metadata.put("feed_forward_length", metadata.integer("expert_feed_forward_length"))
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(metadata.layers)]
    fields = {"layer_types": kinds, "sliding_window": metadata.integer("attention.sliding_window")}
    scaling = rope_scaling(metadata)  # its bounds of interpolation are not rounded, in all that was published
    return fields | ({"rope_scaling": scaling["rope_scaling"] | {"truncate": False}} if scaling else {})


_LLAMA4: dict[str, str | To] = {
    "ffn_gate_inp": "feed_forward.router",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
    "ffn_gate_exps.weight": To("feed_forward.experts.gate_up_proj", _columns),
    "ffn_up_exps.weight": To("feed_forward.experts.gate_up_proj", _columns),
    "ffn_down_exps.weight": To("feed_forward.experts.down_proj", _columns),
    **{name: f"feed_forward.shared_expert.{inner}" for name, inner in _SHARED.items()},
}


def _llama4(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """Chunks, the layers that do not rotate, and the temperature are those of the two published models."""
    wide = metadata.integer("feed_forward_length")
    metadata.put("feed_forward_length", metadata.integer("expert_feed_forward_length"))
    step = metadata.integer("interleave_moe_layer_step")
    return {
        "intermediate_size_mlp": wide,
        "moe_layers": list(range(step - 1, metadata.layers, step)),
        "interleave_moe_layer_step": step,
        # norms of q and k: Scout, with 16 experts, has them, and Maverick, with 128, does not
        "use_qk_norm": metadata.integer("expert_count") != 128,
    }


def _minimax(metadata: Metadata, file: GgufFile) -> ConfigJson:
    metadata.expect("expert_gating_func", SIGMOID)
    metadata.take("feed_forward_length")
    metadata.put("feed_forward_length", metadata.integer("expert_feed_forward_length"))
    return {"rotary_dim": metadata.integer("rope.dimension_count", metadata.head_dim)}


def _lfm2_moe(metadata: Metadata, file: GgufFile) -> ConfigJson:
    metadata.expect("expert_gating_func", SIGMOID)
    return lfm2(metadata, file)


def _hunyuan_moe(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """One shared expert, as wide as the others."""
    width = metadata.integer("feed_forward_length")
    for name in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        metadata.expect(name, width)
    metadata.expect("expert_shared_count", 1)
    return hunyuan(metadata, file)


def _phi_moe(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """The band of scores that share a weight is that of the published model.

    The factor on cos and sin is that of the file. llama.cpp's converter writes that of Phi 3's rule, which is another
    than the one that Phi 3.5 MoE's folder has.
    """
    lists, original, scale = phi_longrope(metadata, file)
    fields: ConfigJson = {
        "sliding_window": metadata.count("attention.sliding_window") or None,
        "lm_head_bias": "output.bias" in file.tensors,
    }
    if not lists:
        return fields
    scales = dict.fromkeys(("short_mscale", "long_mscale"), scale)
    rope = {"rope_type": "longrope", "original_max_position_embeddings": original, **lists, **scales}
    return fields | {"rope_scaling": rope}


def _of(model_type: str) -> dict[str, str]:
    return {"model_type": model_type, **_SILU}


_BIASES = {"attention_bias": "attn_q.bias"}
GROUPED_EXPERTS = experts("mlp.gate", "mlp.shared_experts", "mlp.gate.e_score_correction_bias")

ROUTED: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(_of("llama"), LAYER | _MIXTRAL, more=_llama, interleaved=True),
        # The weights of the chosen experts add up to one for qwen3moe, without a key, and not for the two others.
        "qwen3moe": Architecture(
            _of("qwen3_moe") | {"norm_topk_prob": True} | _EVERY_LAYER,
            LAYER | experts(),
            QWEN,
            with_head_dim=True,
        ),
        "qwen3vlmoe": Architecture(
            _of("qwen3_moe") | {"norm_topk_prob": True} | _EVERY_LAYER,
            LAYER | experts(),
            QWEN,
            more=vision_rope,
            without=IN_ROPE,
            with_head_dim=True,
        ),
        "hunyuan-moe": Architecture(
            _of("hunyuan_v1_moe"),
            HUNYUAN | experts("mlp.gate.wg", "mlp.shared_mlp"),
            {"num_experts": "expert_count", "moe_topk": "expert_used_count"},
            flags={"attention_bias": "attn_q.bias"},
            more=_hunyuan_moe,
            with_head_dim=True,
        ),
        "phimoe": Architecture(
            _of("phimoe"),
            LAYER | _MIXTRAL,
            {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
            flags={"attention_bias": "attn_q.bias"},
            more=_phi_moe,
        ),
        "qwen2moe": Architecture(
            _of("qwen2_moe") | {"norm_topk_prob": False} | _EVERY_LAYER,
            LAYER | experts("mlp.gate", "mlp.shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"},
            QWEN | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        ),
        "olmoe": Architecture(
            _of("olmoe") | {"norm_topk_prob": False},
            LAYER | experts(),
            {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        ),
        "ernie4_5-moe": Architecture(
            _of("ernie4_5_moe"),
            LAYER
            | experts("mlp.gate", "mlp.shared_experts")
            | {"exp_probs_b.bias": To("mlp.moe_statics.e_score_correction_bias", _row)},
            {
                "moe_num_experts": "expert_count",
                "moe_k": "expert_used_count",
                "moe_intermediate_size": "expert_feed_forward_length",
                "moe_num_shared_experts": "expert_shared_count",
                "moe_layer_start_index": "leading_dense_block_count",
                "moe_layer_interval": "interleave_moe_layer_step",
            },
            flags={"use_bias": "attn_q.bias"},
            more=_ernie_moe,
            with_head_dim=True,
        ),
        "glm4moe": Architecture(
            _of("glm4_moe"),
            LAYER | GROUPED_EXPERTS | _MTP | {"post_attention_norm": "post_attention_layernorm"},
            GROUPED,
            flags=_BIASES | {"use_qk_norm": "attn_q_norm.weight"},
            more=_glm4_moe,
            with_head_dim=True,
        ),
        "dots1": Architecture(
            _of("dots1"), LAYER | GROUPED_EXPERTS, GROUPED, flags=_BIASES, more=_dots1, with_head_dim=True
        ),
        "exaone-moe": Architecture(
            _of("exaone_moe"),
            LAYER | experts("mlp.gate", "mlp.shared_experts", "mlp.e_score_correction_bias"),
            QWEN | {"num_shared_experts": "expert_shared_count"},
            more=_exaone_moe,
            with_head_dim=True,
        ),
        "granitemoe": Architecture(
            _of("granitemoe"),
            LAYER | GRANITE_MOE,
            {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
            GRANITE,
            _BIASES,
            more=_granite_moe,
            interleaved=True,
        ),
        "afmoe": Architecture(
            _of("afmoe") | {"mup_enabled": True},
            LAYER
            | experts("mlp.router.gate", "mlp.shared_experts", "mlp.expert_bias")
            | {
                "post_attention_norm": "post_attention_layernorm",
                "ffn_norm": "pre_mlp_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
                "attn_gate": "self_attn.gate_proj",
            },
            QWEN | {"num_shared_experts": "expert_shared_count", "num_dense_layers": "leading_dense_block_count"},
            {"route_scale": "expert_weights_scale"},
            more=_afmoe,
            with_head_dim=True,
        ),
        "gpt-oss": Architecture(
            {"model_type": "gpt_oss"},
            LAYER | _GPT_OSS,
            {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
            flags=_BIASES,
            more=_gpt_oss,
            with_head_dim=True,
        ),
        "llama4": Architecture(
            _of("llama4_text"),
            LAYER | _LLAMA4,
            {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
            more=_llama4,
            with_head_dim=True,
        ),
        "minimax-m2": Architecture(
            _of("minimax_m2") | {"use_qk_norm": True},
            LAYER | dict(_MIXTRAL.items()) | {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
            {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
            more=_minimax,
            with_head_dim=True,
        ),
        "lfm2moe": Architecture(
            {"model_type": "lfm2_moe"},
            {
                **LFM2,
                "ffn_gate_inp": "feed_forward.gate",
                "ffn_gate_exps": "feed_forward.experts.{}.w1",
                "ffn_up_exps": "feed_forward.experts.{}.w3",
                "ffn_down_exps": "feed_forward.experts.{}.w2",
                "exp_probs_b.bias": "feed_forward.expert_bias",
            },
            QWEN | {"num_dense_layers": "leading_dense_block_count"},
            more=_lfm2_moe,
            top=LFM2_TOP,
        ),
    }
)

"""Architectures of GGUF files of Gemma 3n, Gemma 4 and EmbeddingGemma."""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fnmodels.errors import UnsupportedError
from fnmodels.models.common.config_json import ConfigJson

from .architecture import TOP, Architecture, tensor_of
from .dense import GEMMA, gemma3
from .header import GgufFile
from .metadata import Metadata, rows_of
from .rotary_factors import ROPE_FACTORS

_TANH = "gelu_pytorch_tanh"
_PER_LAYER = {"inp_gate": "per_layer_input_gate", "proj": "per_layer_projection"}
_PER_LAYER |= {"post_norm": "post_per_layer_input_norm"}
_TOP = TOP | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_PER_LAYER_TOKENS = "per_layer_token_embd.weight"


def _layer_types(metadata: Metadata, period: int | None) -> list[str]:
    """By a list of switches; where a period stands for it, the last layer of each sees all tokens.

    period: that of a file without the key; None where only a list is read.
    """
    key = "attention.sliding_window_pattern"
    value = metadata.take(key, period)
    if period is not None and type(value) is int:
        every = metadata.integer(key, period)
        flags: list[Any] = [(i + 1) % every != 0 for i in range(metadata.layers)]
    else:
        flags = metadata.each_layer(key)
        if not isinstance(value, list) or any(flag not in (0, 1) for flag in flags):
            raise UnsupportedError(
                f"{metadata.path}: '{metadata.architecture}.{key}' is {value!r}; read is true or false for each layer."
            )
    return ["sliding_attention" if near else "full_attention" for near in flags]


def _shared(metadata: Metadata, file: GgufFile, period: int | None = None) -> ConfigJson:
    """The window, the layers that read others' keys, and the embeddings of tokens for each layer."""
    width = metadata.count("embedding_length_per_layer_input")
    rows = {"vocab_size_per_layer_input": rows_of(metadata, _PER_LAYER_TOKENS)} if width else {}
    return {
        "layer_types": _layer_types(metadata, period),
        "sliding_window": metadata.integer("attention.sliding_window"),
        "num_kv_shared_layers": metadata.count("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": width,
        **rows,
    }


def _share(multiple: float) -> float:
    """The share of neurons left out, of which a file has how many deviations above the mean it lies."""
    return round((1 + math.erf(multiple / math.sqrt(2))) / 2, 5)


def _gemma3n(metadata: Metadata, file: GgufFile) -> ConfigJson:
    metadata.expect("altup.active_idx", 0)
    thetas = {"full_attention": "rope.freq_base", "sliding_attention": "rope.freq_base_swa"}
    defaults = {"full_attention": 1e6, "sliding_attention": 1e4}  # no file of before 2026 has the second key
    return {
        **_shared(metadata, file, period=5),
        "altup_num_inputs": metadata.integer("altup.num_inputs"),
        "laurel_rank": rows_of(metadata, "blk.0.laurel_l.weight"),
        "activation_sparsity_pattern": [_share(one) for one in metadata.each_layer("activation_sparsity_scale")],
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": metadata.number(key, defaults[kind])}
            for kind, key in thetas.items()
        },
    }


def _gemma4(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """Layers that see all tokens have heads of another size and number, and may take their keys as values."""
    fields = _shared(metadata, file)
    full = metadata.integer("attention.key_length")
    near = metadata.integer("attention.key_length_swa", full)
    for name, size in (("attention.value_length", full), ("attention.value_length_swa", near)):
        metadata.expect(name, size)
    for name, size in (("rope.dimension_count", full), ("rope.dimension_count_swa", near)):
        metadata.expect(name, size)
    for name in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        metadata.put(name, near)
    widths, heads = metadata.each_layer("feed_forward_length"), metadata.each_layer("attention.head_count_kv")
    slides = [kind == "sliding_attention" for kind in fields["layer_types"]]
    near_heads, full_heads = (
        {count for count, s in zip(heads, slides, strict=True) if s is on} for on in (True, False)
    )
    if len(near_heads) != 1 or len(full_heads) != 1 or set(widths) - {widths[0], 2 * widths[0]}:
        raise UnsupportedError(f"{file.path}: layers of one kind differ in their number of heads or their widths.")
    metadata.put("feed_forward_length", widths[0])
    metadata.put("attention.head_count_kv", *near_heads)
    first = metadata.layers - fields["num_kv_shared_layers"]
    own = [f"blk.{i}.attn_v.weight" in file.tensors for i in range(first) if not slides[i]]
    fields |= {"attention_k_eq_v": not all(own), "use_double_wide_mlp": widths[-1] != widths[0]}
    fields |= {"num_global_key_value_heads": full_heads.pop()} if not all(own) else {}
    fields |= {
        "global_head_dim": full,
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 0.0) or None,
    }
    return fields | {"rope_parameters": _ropes(metadata, file, full)} | _experts(metadata)


def _ropes(metadata: Metadata, file: GgufFile, full: int) -> ConfigJson:
    """Full layers rotate the first pairs of a head; the file divides the frequencies of others by a huge number."""
    turned = full // 2
    if ROPE_FACTORS in file.tensors:
        factors = tensor_of(file, ROPE_FACTORS)
        turned = int((factors == 1).sum())
        if not (factors[:turned] == 1).all() or not (factors[turned:] >= 1e29).all() or len(factors) != full // 2:
            raise UnsupportedError(f"{file.path}: the tensor {ROPE_FACTORS!r} is not 1 for the first pairs of a head.")
    theta, local = metadata.number("rope.freq_base", 1e6), metadata.number("rope.freq_base_swa", 1e4)
    rope = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": 2 * turned / full}
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def _experts(metadata: Metadata) -> ConfigJson:
    count = metadata.count("expert_count")
    if not count:
        return {}
    return {
        "enable_moe_block": True,
        "num_experts": count,
        "top_k_experts": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }


def _embedding(metadata: Metadata, file: GgufFile) -> ConfigJson:
    metadata.expect("attention.causal", False)
    return gemma3(metadata, file)


GEMMAS: Mapping[str, Architecture] = MappingProxyType(
    {
        "gemma-embedding": Architecture(
            {
                "model_type": "gemma3_text",
                "architectures": ["Gemma3TextModel"],
                "hidden_activation": _TANH,
                "use_bidirectional_attention": True,
            },
            GEMMA,
            more=_embedding,
            with_head_dim=True,
            norm_offset=1.0,
            top={"token_embd": "embed_tokens", "output_norm": "norm"},
            root="layers",
        ),
        "gemma3n": Architecture(
            {"model_type": "gemma3n_text", "hidden_activation": _TANH},
            GEMMA
            | _PER_LAYER
            | {
                "altup_correct_coef": "altup.correction_coefs",
                "altup_correct_scale.weight": "altup.correct_output_scale",
                "altup_predict_coef": "altup.prediction_coefs",
                "altup_router": "altup.modality_router",
                "altup_router_norm": "altup.router_norm",
                "laurel_l": "laurel.linear_left",
                "laurel_r": "laurel.linear_right",
                "laurel_post_norm": "laurel.post_laurel_norm",
            },
            more=_gemma3n,
            without=("rope_theta", "rope_scaling"),
            with_head_dim=True,
            top=_TOP
            | {"altup_proj": "model.altup_projections.{}", "altup_unembd_proj": "model.altup_unembed_projections.{}"},
        ),
        "gemma4": Architecture(
            {"model_type": "gemma4_text", "hidden_activation": _TANH},
            GEMMA
            | _PER_LAYER
            | {
                "layer_output_scale.weight": "layer_scalar",
                "ffn_gate_inp": "router.proj",
                "ffn_gate_inp.scale": "router.scale",
                "ffn_down_exps.scale": "router.per_expert_scale",
                "ffn_gate_up_exps.weight": "experts.gate_up_proj",
                "ffn_down_exps.weight": "experts.down_proj",
                "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
                "post_ffw_norm_1": "post_feedforward_layernorm_1",
                "post_ffw_norm_2": "post_feedforward_layernorm_2",
            },
            more=_gemma4,
            without=("rope_theta", "rope_scaling"),
            with_head_dim=True,
            top=_TOP,
        ),
    }
)

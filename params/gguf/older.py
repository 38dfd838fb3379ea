"""Architectures of GGUF files of the decoders of 2019 to 2022: LayerNorms, fused rows of q, k and v, no gate."""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.models.common.config_json import ConfigJson

from .architecture import Architecture, Names, To
from .header import GgufFile
from .metadata import Metadata, scaled_rope

_TANH = "gelu_pytorch_tanh"
_GPT_TOP = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_GPT = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_MLP = {"ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}
_PLACES = ("rope_theta", "rope_scaling")  # these do not rotate, but for GPT-NeoX, which has rope_parameters


def _transposed(tensors: Sequence[Tensor]) -> Tensor:
    """A matrix that multiplies from the right."""
    return tensors[0].T


def _by_groups(tensors: Sequence[Tensor], heads: int, groups: int) -> Tensor:
    """Rows of queries, of keys and of values, as rows of each head of keys: its queries, its key, its value."""
    (both,) = tensors
    size = both.shape[0] // (heads + 2 * groups)
    q, k, v = both.split((heads * size, groups * size, groups * size))
    parts = [part.reshape(groups, -1, *both.shape[1:]) for part in (q, k, v)]
    return torch.cat(parts, 1).reshape(both.shape)


def _grouped(name: str, values: Mapping[str, Any], groups: int) -> Names:
    change = partial(_by_groups, heads=values["num_attention_heads"], groups=groups)
    return {f"attn_qkv.{end}": To(f"{name}.{end}", change) for end in ("weight", "bias")}


def _falcon_names(values: Mapping[str, Any]) -> Names:
    """Two norms of a layer have other names than one."""
    norms = {"attn_norm_2": "ln_attn", "attn_norm": "ln_mlp"}
    own = norms if values["num_ln_in_parallel_attn"] == 2 else {"attn_norm": "input_layernorm"}
    return {**own, **_grouped("self_attention.query_key_value", values, values["num_kv_heads"])}


def _falcon(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """Attention and MLP side by side; models with more than one head of keys are of the second form."""
    groups, norms = metadata.integer("attention.head_count_kv"), 1 + ("blk.0.attn_norm_2.weight" in file.tensors)
    return {
        "num_kv_heads": groups,
        "new_decoder_architecture": groups > 1 or norms == 2,
        "multi_query": True,
        "num_ln_in_parallel_attn": norms,
        "ffn_hidden_size": metadata.integer("feed_forward_length"),
    }


def _neox(metadata: Metadata, file: GgufFile) -> ConfigJson:
    fraction = metadata.integer("rope.dimension_count", metadata.head_dim) / metadata.head_dim
    rope = scaled_rope(metadata) | {"partial_rotary_factor": fraction}
    return {"use_parallel_residual": metadata.switch("use_parallel_residual"), "rope_parameters": rope}


def _inner(metadata: Metadata, file: GgufFile) -> ConfigJson:
    return {"n_inner": metadata.integer("feed_forward_length")}


def _star_coder(metadata: Metadata, file: GgufFile) -> ConfigJson:
    groups, heads = metadata.integer("attention.head_count_kv"), metadata.integer("attention.head_count")
    if groups not in (1, heads):
        raise UnsupportedError(f"{file.path}: 'starcoder.attention.head_count_kv' is {groups}; read are 1 and {heads}.")
    return {"multi_query": groups == 1, **_inner(metadata, file)}


def _star_coder_names(values: Mapping[str, Any]) -> Names:
    """With one head of keys for all, its rows are behind those of queries in both."""
    return {} if values["multi_query"] else _grouped("attn.c_attn", values, values["num_attention_heads"])


def _mpt(metadata: Metadata, file: GgufFile) -> ConfigJson:
    # without the key llama.cpp adds no ALiBi
    if (bias := metadata.number("attention.max_alibi_bias", 0.0)) != 8.0:
        raise UnsupportedError(f"{file.path}: 'mpt.attention.max_alibi_bias' is {bias}; only 8.0 is read.")
    metadata.expect("attention.head_count_kv", metadata.integer("attention.head_count"))
    return {
        "attn_config": {"alibi": True, "clip_qkv": metadata.number("attention.clamp_kqv", 0.0) or None},
        "no_bias": True,
    }


OLDER: Mapping[str, Architecture] = MappingProxyType(
    {
        "gpt2": Architecture(
            {"model_type": "gpt2", "activation_function": "gelu_new"},
            {
                **_GPT,
                **{
                    f"{name}.weight": To(f"{_GPT[name]}.weight", _transposed)
                    for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
                },
            },
            more=_inner,
            epsilon="layer_norm_epsilon",
            without=(*_PLACES, "num_key_value_heads", "intermediate_size"),
            top=_GPT_TOP,
            root="transformer.h",
        ),
        "starcoder": Architecture(
            {"model_type": "gpt_bigcode", "activation_function": _TANH},
            _GPT,
            more=_star_coder,
            epsilon="layer_norm_epsilon",
            without=(*_PLACES, "num_key_value_heads", "intermediate_size"),
            sized=_star_coder_names,
            top=_GPT_TOP,
            root="transformer.h",
        ),
        "gptneox": Architecture(
            {"model_type": "gpt_neox", "hidden_act": "gelu"},
            {**_NORMS, **_MLP, "attn_output": "attention.dense"},
            flags={"attention_bias": "attn_qkv.bias"},
            more=_neox,
            epsilon="layer_norm_eps",
            without=(*_PLACES, "num_key_value_heads"),
            sized=lambda values: _grouped("attention.query_key_value", values, values["num_attention_heads"]),
            top={
                "token_embd": "gpt_neox.embed_in",
                "output_norm": "gpt_neox.final_layer_norm",
                "output": "embed_out",
            },
            root="gpt_neox.layers",
        ),
        "falcon": Architecture(
            {"model_type": "falcon", "activation": "gelu", "parallel_attn": True, "alibi": False, "bias": False},
            {**_MLP, "attn_output": "self_attention.dense"},
            more=_falcon,
            epsilon="layer_norm_epsilon",
            without=("intermediate_size", "num_key_value_heads"),
            sized=_falcon_names,
            top={
                "token_embd": "transformer.word_embeddings",
                "output_norm": "transformer.ln_f",
                "output": "lm_head",
            },
            root="transformer.h",
        ),
        "bloom": Architecture(
            {"model_type": "bloom"},
            {**_NORMS, **_MLP, "attn_output": "self_attention.dense"},
            epsilon="layer_norm_epsilon",
            without=(*_PLACES, "num_key_value_heads", "max_position_embeddings"),
            sized=lambda values: _grouped("self_attention.query_key_value", values, values["num_attention_heads"]),
            top={
                "token_embd": "transformer.word_embeddings",
                "token_embd_norm": "transformer.word_embeddings_layernorm",
                "output_norm": "transformer.ln_f",
                "output": "lm_head",
            },
            root="transformer.h",
        ),
        "mpt": Architecture(
            {"model_type": "mpt"},
            {
                "attn_norm": "norm_1",
                "attn_qkv": "attn.Wqkv",
                "attn_output": "attn.out_proj",
                "ffn_norm": "norm_2",
                "ffn_up": "ffn.up_proj",
                "ffn_down": "ffn.down_proj",
            },
            more=_mpt,
            epsilon="layer_norm_epsilon",
            without=(*_PLACES, "num_key_value_heads"),
            top={"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
            root="transformer.blocks",
        ),
    }
)

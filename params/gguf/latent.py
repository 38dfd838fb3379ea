"""Architectures of GGUF files whose attention reads keys and values from a latent."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.models.common.config_json import ConfigJson

from .architecture import LAYER, Architecture, To
from .header import GgufFile
from .metadata import Metadata
from .routed import GROUPED, GROUPED_EXPERTS, SIGMOID, SOFTMAX, choice


def _deepseek(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """V3 chooses by sigmoids with a bias, V2 by softmax; GLM 4.7 Flash, Kimi K2 and others have V3's layers."""
    is_v3 = any(name.endswith("exp_probs_b.bias") for name in file.tensors)
    if metadata.take("expert_gating_func", SIGMOID if is_v3 else SOFTMAX) != (SIGMOID if is_v3 else SOFTMAX):
        raise UnsupportedError(
            f"{file.path}: 'deepseek2.expert_gating_func' does not fit the "
            f"{'bias' if is_v3 else 'missing bias'} of the choice of experts."
        )
    fields = choice(metadata) | _latent(metadata) | {"model_type": "deepseek_v3" if is_v3 else "deepseek_v2"}
    if is_v3:
        fields["num_nextn_predict_layers"] = 0  # llama.cpp's converter leaves them out
    else:
        fields["topk_method"] = "group_limited_greedy" if fields["n_group"] > 1 else "greedy"
    return fields


def _latent(metadata: Metadata) -> ConfigJson:
    """Sizes of latent attention: keys have channels that rotate beside those that do not."""
    rotated, heads = metadata.integer("rope.dimension_count"), metadata.integer("attention.head_count")
    # Older files say the sizes of heads where newer ones say those of the latent, of which all heads read.
    key = metadata.integer("attention.key_length_mla", metadata.integer("attention.key_length"))
    value = metadata.integer("attention.value_length_mla", metadata.integer("attention.value_length"))
    metadata.put("attention.head_count_kv", heads)
    return {
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "head_dim": rotated,
        "v_head_dim": value,
        "kv_lora_rank": metadata.integer("attention.kv_lora_rank"),
        "q_lora_rank": metadata.count("attention.q_lora_rank") or None,
    }


def _keys_and_values(tensors: Sequence[Tensor]) -> Tensor:
    """The map from the latent: of each head the rows of its keys, which the file has as columns, then of its values."""
    keys, values = tensors
    return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)


_DEEPSEEK: dict[str, str | To] = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b.weight": To("self_attn.kv_b_proj.weight", _keys_and_values),
    "attn_v_b.weight": To("self_attn.kv_b_proj.weight", _keys_and_values),
}

LATENT: Mapping[str, Architecture] = MappingProxyType(
    {
        "deepseek2": Architecture({"hidden_act": "silu"}, LAYER | GROUPED_EXPERTS | _DEEPSEEK, GROUPED, more=_deepseek),
    }
)

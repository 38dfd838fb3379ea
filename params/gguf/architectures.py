"""The architectures that are read: how their metadata become a config.json, and how their tensors are named."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fnmodels.errors import UnsupportedError
from fnmodels.models.common.config_json import ConfigJson

from .blocks import dequantized
from .header import GgufFile
from .metadata import Metadata, decoder_fields

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_inp": "mlp.gate"}
_STACKED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files.

    Attributes:
        fields: the content of config.json, from the metadata.
        layer: {name of a module of a layer: its name in Hugging Face's files}.
        interleaved: whether rows of q and k are in the order of rotations of neighbours (llama.cpp's older form).
        norm_offset: what the file adds to the weights of norms, which multiply by 1 + weight.
    """

    fields: Callable[[Metadata, GgufFile], ConfigJson]
    layer: Mapping[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0


def _llama(metadata: Metadata, file: GgufFile) -> ConfigJson:
    fields: ConfigJson = {"model_type": "llama", "hidden_act": "silu"} | decoder_fields(metadata)
    fields |= {"attention_bias": "blk.0.attn_q.bias" in file.tensors, "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors}
    if _ROPE_FACTORS not in file.tensors:
        return fields
    head_dim = fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    scaling = _llama3_scaling(_tensor(file, _ROPE_FACTORS), fields["rope_theta"], head_dim)
    if scaling is None:
        raise UnsupportedError(
            f"{file.path}: the tensor {_ROPE_FACTORS!r} divides the frequencies by other factors than Llama 3's rule."
        )
    return fields | {"rope_scaling": scaling}


def _llama3_scaling(factors: Tensor, theta: float, head_dim: int) -> ConfigJson | None:
    """The rope_scaling whose factors these are, as published with Llama 3.1 to 3.3; None if there is none."""
    factor, low, high, original = float(factors.max()), 1.0, 4.0, 8192
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    smooth = ((original / (2 * math.pi) * frequencies - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not torch.allclose(factors.double(), expected, rtol=1e-4):
        return None
    bounds = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": original}
    return {"rope_type": "llama3", "factor": factor, **bounds}


def _qwen(model_type: str) -> Callable[[Metadata, GgufFile], ConfigJson]:
    def fields(metadata: Metadata, file: GgufFile) -> ConfigJson:
        return {"model_type": model_type, "hidden_act": "silu"} | decoder_fields(metadata)

    return fields


def _qwen3(metadata: Metadata, file: GgufFile) -> ConfigJson:
    return _with_head_dim(metadata, _qwen("qwen3")(metadata, file))


def _qwen3_moe(metadata: Metadata, file: GgufFile) -> ConfigJson:
    fields = _with_head_dim(metadata, _qwen("qwen3_moe")(metadata, file))
    experts = {
        "num_experts": metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
        "moe_intermediate_size": metadata.integer("expert_feed_forward_length"),
    }
    # The weights of the chosen experts add up to one, which llama.cpp does for this architecture without a key.
    return fields | experts | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _with_head_dim(metadata: Metadata, fields: ConfigJson) -> ConfigJson:
    """The fields with a head_dim, whose default in config.json is another than a quotient."""
    return {"head_dim": fields["hidden_size"] // fields["num_attention_heads"]} | fields


def _gemma3(metadata: Metadata, file: GgufFile) -> ConfigJson:
    fields = _with_head_dim(metadata, decoder_fields(metadata))
    layers = fields["num_hidden_layers"]
    widest = fields["hidden_size"] // fields["num_attention_heads"]
    scaling = {"rope_scaling": fields.pop("rope_scaling")} if "rope_scaling" in fields else {}
    pattern = metadata.integer("attention.sliding_window_pattern", 6)
    return {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": metadata.integer("attention.sliding_window"),
        "layer_types": ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers)],
        # No key has it: the models with 62 layers, 27B, divide by the root of hidden / heads, others by that of a head.
        "query_pre_attn_scalar": widest if layers == 62 else fields["head_dim"],
        "rope_local_base_freq": metadata.number("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": metadata.take("final_logit_softcapping"),
        **fields,
        **scaling,
    }


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(_llama, _LAYER, interleaved=True),
        "qwen2": Architecture(_qwen("qwen2"), _LAYER),
        "qwen3": Architecture(_qwen3, _LAYER),
        "qwen3moe": Architecture(_qwen3_moe, _LAYER | _EXPERTS),
        "gemma3": Architecture(_gemma3, _LAYER | _GEMMA, norm_offset=1.0),
    }
)


def config_values(file: GgufFile) -> ConfigJson:
    """The content of the config.json of this model. UnsupportedError and ConfigError name the key."""
    metadata = Metadata(file.path, file.metadata, file.tensors)
    values = architecture_of(file).fields(metadata, file)
    metadata.check_all_read()
    return values


def architecture_of(file: GgufFile) -> Architecture:
    """UnsupportedError where it is not read."""
    name = Metadata(file.path, file.metadata, file.tensors).architecture
    if name not in ARCHITECTURES:
        raise UnsupportedError(
            f"{file.path}: 'general.architecture' is {name!r}; of GGUF files {', '.join(ARCHITECTURES)} are read."
        )
    return ARCHITECTURES[name]


def named_tensors(file: GgufFile, values: Mapping[str, Any], *, meta: bool) -> Iterator[tuple[str, Tensor]]:
    """(name in Hugging Face's files, tensor in fp32) of every tensor but those that became fields of config.json.

    Args:
        file: whose header is checked.
        values: of `config_values`.
        meta: the tensors have shapes alone, and nothing is read.
    """
    architecture = architecture_of(file)
    heads = {"attn_q": values["num_attention_heads"], "attn_k": values["num_key_value_heads"]}
    for name in file.tensors:
        if name == _ROPE_FACTORS:
            continue
        tensor = torch.empty(file.tensors[name].shape, device="meta") if meta else _tensor(file, name)
        layer, module, end = _split(name)
        if architecture.interleaved and module in heads and tensor.shape[0] % (2 * heads[module]) == 0:
            tensor = _halves(tensor, heads[module])
        if architecture.norm_offset and module.endswith("_norm"):
            tensor = tensor - architecture.norm_offset
        if layer is None:
            yield f"{_TOP.get(module, module)}{end}", tensor
        elif module in _STACKED:
            for expert, one in enumerate(tensor):
                yield f"model.layers.{layer}.mlp.experts.{expert}.{_STACKED[module]}{end}", one
        else:
            yield f"model.layers.{layer}.{architecture.layer.get(module, module)}{end}", tensor


def _tensor(file: GgufFile, name: str) -> Tensor:
    return dequantized(file.read(name), file.tensors[name].kind, file.tensors[name].shape)


def _split(name: str) -> tuple[int | None, str, str]:
    """(layer or None, module, ".weight" or ".bias") of a tensor's name."""
    match = re.fullmatch(r"(?:blk\.(\d{1,4})\.)?([a-z0-9_.]+?)(\.weight|\.bias|)", name)
    if match is None:
        return None, name, ""
    return None if match[1] is None else int(match[1]), match[2], match[3]


def _halves(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head, of which neighbours are rotated together, with the first ones before the second ones."""
    return tensor.reshape(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)

"""The architectures that are read: how their metadata become a config.json, and how their tensors are named."""

import math
import re
from collections.abc import Callable, Mapping
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
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_STACKED = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_EXPERTS = {"ffn_gate_inp": "mlp.gate"} | {name: f"mlp.experts.{{}}.{inner}" for name, inner in _STACKED.items()}
_SHARED_EXPERT = {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj"}
_SHARED_EXPERT |= {"ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj"}
_MIXTRAL = {"ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1"}
_MIXTRAL |= {"ffn_up_exps": "block_sparse_moe.experts.{}.w3", "ffn_down_exps": "block_sparse_moe.experts.{}.w2"}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_TWO_MATRICES = {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF files.

    Attributes:
        fields: the content of config.json, from the metadata.
        layer: {name of a module of a layer: its name in Hugging Face's files}, with {} for the number of an expert.
        interleaved: whether rows of q and k are in the order of rotations of neighbours (llama.cpp's older form).
        norm_offset: what the file adds to the weights of norms, which multiply by 1 + weight.
    """

    fields: Callable[[Metadata, GgufFile], ConfigJson]
    layer: Mapping[str, str]
    interleaved: bool = False
    norm_offset: float = 0.0


def _llama(metadata: Metadata, file: GgufFile) -> ConfigJson:
    """Mixtral is of this architecture too, with experts."""
    fields: ConfigJson = {"model_type": "llama", "hidden_act": "silu"} | decoder_fields(metadata)
    if "blk.0.ffn_gate_inp.weight" in file.tensors:
        return fields | _experts(metadata, "num_local_experts") | {"model_type": "mixtral"}
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


def _experts(metadata: Metadata, count: str = "num_experts") -> ConfigJson:
    return {
        count: metadata.integer("expert_count"),
        "num_experts_per_tok": metadata.integer("expert_used_count"),
    }


def _qwen3_moe(metadata: Metadata, file: GgufFile) -> ConfigJson:
    fields = _with_head_dim(metadata, _qwen("qwen3_moe")(metadata, file)) | _experts(metadata)
    fields |= {"moe_intermediate_size": metadata.integer("expert_feed_forward_length")}
    # The weights of the chosen experts add up to one, which llama.cpp does for this architecture without a key.
    return fields | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _qwen2_moe(metadata: Metadata, file: GgufFile) -> ConfigJson:
    fields = _qwen("qwen2_moe")(metadata, file) | _experts(metadata)
    fields |= {"moe_intermediate_size": metadata.integer("expert_feed_forward_length")}
    fields |= {"shared_expert_intermediate_size": metadata.integer("expert_shared_feed_forward_length")}
    # Nor do the weights of the chosen experts add up to one here.
    return fields | {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []}


def _olmoe(metadata: Metadata, file: GgufFile) -> ConfigJson:
    return _qwen("olmoe")(metadata, file) | _experts(metadata) | {"norm_topk_prob": False}


def _granite(metadata: Metadata, file: GgufFile) -> ConfigJson:
    scales = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    fields: ConfigJson = {"model_type": "granite", "hidden_act": "silu"} | decoder_fields(metadata)
    return fields | {name: metadata.number(key) for name, key in scales.items()}


def _cohere(metadata: Metadata, file: GgufFile) -> ConfigJson:
    fields = _layer_norms("cohere", "layer_norm_eps", "silu")(metadata, file)
    if "blk.0.attn_q_norm.weight" in file.tensors:
        raise UnsupportedError(f"{file.path}: norms of q and k in the architecture command-r are not read.")
    return fields | {"logit_scale": metadata.number("logit_scale")}


def _stablelm(metadata: Metadata, file: GgufFile) -> ConfigJson:
    heads, hidden = metadata.integer("attention.head_count"), metadata.integer("embedding_length")
    if "blk.0.attn_q_norm.weight" in file.tensors:
        raise UnsupportedError(f"{file.path}: norms of q and k in the architecture stablelm are not read.")
    rotated = metadata.integer("rope.dimension_count", hidden // heads)
    fields = _layer_norms("stablelm", "layer_norm_eps", "silu")(metadata, file)
    fields |= {"partial_rotary_factor": rotated / (hidden // heads)}
    fields |= {"use_parallel_residual": metadata.take("use_parallel_residual", False)}
    return fields | {"use_qkv_bias": "blk.0.attn_q.bias" in file.tensors}


def _layer_norms(model_type: str, eps: str, act: str) -> Callable[[Metadata, GgufFile], ConfigJson]:
    """Models whose norms subtract the mean. eps: the name of their epsilon."""

    def fields(metadata: Metadata, file: GgufFile) -> ConfigJson:
        common = decoder_fields(metadata, "attention.layer_norm_epsilon")
        return {"model_type": model_type, "hidden_act": act, eps: common.pop("rms_norm_eps"), **common}

    return fields


def _phi3(metadata: Metadata, file: GgufFile) -> ConfigJson:
    fields: ConfigJson = {"model_type": "phi3", "hidden_act": "silu"} | decoder_fields(metadata)
    fields |= {"original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length", 4096)}
    fields |= {"sliding_window": metadata.take("attention.sliding_window") or None}
    if "rope_factors_long.weight" in file.tensors:
        raise UnsupportedError(f"{file.path}: the rotary factors of long contexts (rope_factors_long) are not read.")
    return fields


def _seed_oss(metadata: Metadata, file: GgufFile) -> ConfigJson:
    fields = _with_head_dim(metadata, _qwen("seed_oss")(metadata, file))
    biases = {name: f"blk.0.{tensor}.bias" in file.tensors for name, tensor in _SEED_BIASES.items()}
    return fields | biases


_SEED_BIASES = {"attention_bias": "attn_q", "attention_out_bias": "attn_output", "mlp_bias": "ffn_gate"}


def _gemma(metadata: Metadata, file: GgufFile) -> ConfigJson:
    fields = _with_head_dim(metadata, decoder_fields(metadata))
    return {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh", **fields}


def _gemma2(metadata: Metadata, file: GgufFile) -> ConfigJson:
    fields = _gemma(metadata, file)
    widest = fields["hidden_size"] // fields["num_attention_heads"]
    return fields | {
        "model_type": "gemma2",
        "sliding_window": metadata.integer("attention.sliding_window"),
        # No key has it: 27B, the model with 46 layers, divides by the root of hidden / heads, others by that of a head.
        "query_pre_attn_scalar": widest if fields["num_hidden_layers"] == 46 else fields["head_dim"],
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
    }


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
        "llama": Architecture(_llama, _LAYER | _MIXTRAL, interleaved=True),
        "qwen2": Architecture(_qwen("qwen2"), _LAYER),
        "qwen3": Architecture(_qwen3, _LAYER),
        "qwen3moe": Architecture(_qwen3_moe, _LAYER | _EXPERTS),
        "qwen2moe": Architecture(_qwen2_moe, _LAYER | _EXPERTS | _SHARED_EXPERT),
        "olmoe": Architecture(_olmoe, _LAYER | _EXPERTS),
        "olmo2": Architecture(_qwen("olmo2"), _LAYER | _POST_NORMS),
        "seed_oss": Architecture(_seed_oss, _LAYER | {"post_attention_norm": "post_attention_layernorm"}),
        "granite": Architecture(_granite, _LAYER, interleaved=True),
        "phi3": Architecture(_phi3, _LAYER | _FUSED),
        "stablelm": Architecture(_stablelm, _LAYER),
        "starcoder2": Architecture(
            _layer_norms("starcoder2", "norm_epsilon", "gelu_pytorch_tanh"), _LAYER | _TWO_MATRICES
        ),
        "command-r": Architecture(_cohere, _LAYER),
        "gemma": Architecture(_gemma, _LAYER, norm_offset=1.0),
        "gemma2": Architecture(_gemma2, _LAYER | _GEMMA, norm_offset=1.0),
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


@dataclass(frozen=True)
class Stored:
    """A tensor of the model under its name in Hugging Face's files.

    Attributes:
        name: of a tensor of the file.
        expert: the part of that which it is; None for all of it.
        heads: of rows to be brought into the order of halves; 0 for none.
        offset: what the file has added to its values.
    """

    name: str
    expert: int | None = None
    heads: int = 0
    offset: float = 0.0


def stored_tensors(file: GgufFile, values: Mapping[str, Any]) -> dict[str, Stored]:
    """{name in Hugging Face's files: where it is} of every tensor but those that became fields of config.json.

    Args:
        file: whose header is checked.
        values: of `config_values`.
    """
    architecture = architecture_of(file)
    heads = {"attn_q": values["num_attention_heads"], "attn_k": values["num_key_value_heads"]}
    found: dict[str, Stored] = {}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        layer, module, end = _split(name)
        turned = architecture.interleaved and module in heads and tensor.shape[0] % (2 * heads[module]) == 0
        offset = architecture.norm_offset if module.endswith("_norm") else 0.0
        stored = Stored(name, None, heads[module] if turned else 0, offset)
        if layer is None:
            found[f"{_TOP.get(module, module)}{end}"] = stored
            continue
        path = f"model.layers.{layer}.{architecture.layer.get(module, module)}{end}"
        if "{}" not in path:
            found[path] = stored
            continue
        for expert in range(tensor.shape[0]):
            found[path.format(expert)] = Stored(name, expert)
    return found


def shape_of(file: GgufFile, stored: Stored) -> tuple[int, ...]:
    """The shape of a tensor of the model. A gate with one output, which the file has as a vector, is a matrix."""
    shape = file.tensors[stored.name].shape[0 if stored.expert is None else 1 :]
    return (1, *shape) if stored.name.endswith("ffn_gate_inp_shexp.weight") and len(shape) == 1 else shape


def value_of(file: GgufFile, stored: Stored) -> Tensor:
    """The tensor in fp32."""
    tensor = file.tensors[stored.name]
    shape = shape_of(file, stored)
    read = dequantized(file.read(stored.name, stored.expert), tensor.kind, shape)
    return _in_order(read, stored) - stored.offset if stored.offset else _in_order(read, stored)


def blocks_of(file: GgufFile, stored: Stored) -> Tensor:
    """The rows of a matrix as the file has them, uint8 [rows, bytes]."""
    data = torch.frombuffer(file.read(stored.name, stored.expert), dtype=torch.uint8)
    return _in_order(data.view(shape_of(file, stored)[0], -1), stored)


def _in_order(rows: Tensor, stored: Stored) -> Tensor:
    return _halves(rows, stored.heads) if stored.heads else rows


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

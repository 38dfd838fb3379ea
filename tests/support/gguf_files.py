"""GGUF files of tiny models, written by the gguf package with its names: what llama.cpp's converter would write."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from tests.support.oracle import model_of, on_disk

Change = Callable[[gguf.GGUFWriter], object]
_BASE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
_GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5e4, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
# {architecture: config.json}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_BASE, **_ROPE, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", **_BASE, **_ROPE},
    "qwen3": {"model_type": "qwen3", **_BASE, **_ROPE, "head_dim": 32},
    "qwen3moe": {
        "model_type": "qwen3_moe",
        **_BASE,
        **_ROPE,
        "head_dim": 32,
        "norm_topk_prob": True,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "mixtral": {"model_type": "mixtral", **_BASE, **_ROPE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2moe": {
        "model_type": "qwen2_moe",
        **_BASE,
        **_ROPE,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": False,
    },
    "olmoe": {"model_type": "olmoe", **_BASE, **_ROPE, "num_experts": 6, "num_experts_per_tok": 2},
    "olmo2": {"model_type": "olmo2", **_BASE, **_ROPE},
    "seed_oss": {"model_type": "seed_oss", **_BASE, **_ROPE, "head_dim": 32, "attention_bias": True},
    "granite": {
        "model_type": "granite",
        **_BASE,
        **_ROPE,
        "attention_multiplier": 0.5,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.25,
        "logits_scaling": 8.0,
    },
    "phi3": {"model_type": "phi3", **_BASE, **_ROPE, "pad_token_id": 0, "original_max_position_embeddings": 48},
    "stablelm": {
        "model_type": "stablelm",
        **_BASE,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.25},
        "layer_norm_eps": 1e-5,
        "use_qkv_bias": True,
    },
    "starcoder2": {"model_type": "starcoder2", **_BASE, **_ROPE, "norm_epsilon": 1e-5, "tie_word_embeddings": True},
    "command-r": {
        "model_type": "cohere",
        **_BASE,
        **_ROPE,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
    },
    "gemma": {"model_type": "gemma", **_BASE, **_ROPE, "head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {
        "model_type": "gemma2",
        **_BASE,
        **_ROPE,
        "head_dim": 32,
        "sliding_window": 8,
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 40.0,
        "final_logit_softcapping": 20.0,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **_BASE,
        "rope_parameters": _GEMMA_ROPE,
        "head_dim": 32,
        "sliding_window": 8,
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True,
    },
}


LAYER_NORMS = ("stablelm", "starcoder2", "command-r")


def tensors_of(values: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of the checkpoint of `model_of(values)`, by their Hugging Face names."""
    return {name: tensor.detach() for name, tensor in on_disk(model_of(values)).items()}


def write_gguf(
    path: Path,
    architecture: str,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    change: Change = lambda writer: None,
    quantized: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Writes `tensors` with the metadata of `values`; `change` adds to them before the file is written.

    quantized: the type of matrices, except for embeddings and routers.
    """
    architecture = "llama" if architecture == "mixtral" else architecture  # with experts
    writer = gguf.GGUFWriter(path, architecture)
    _write_metadata(writer, architecture, values)
    change(writer)
    for name, tensor in _merged(architecture, values, tensors).items():
        data = tensor.contiguous().numpy()
        if quantized is not None and data.ndim > 1 and "blk" in name and "gate_inp" not in name:
            writer.add_tensor(name, gguf.quants.quantize(data, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_metadata(writer: gguf.GGUFWriter, architecture: str, values: Mapping[str, Any]) -> None:
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_feed_forward_length(values["intermediate_size"])
    writer.add_head_count(values["num_attention_heads"])
    writer.add_head_count_kv(values["num_key_value_heads"])
    if architecture in LAYER_NORMS:
        writer.add_layer_norm_eps(values["rms_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(values["rms_norm_eps"])
    rope = values["rope_parameters"]
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "head_dim" in values:
        writer.add_key_length(values["head_dim"])
        writer.add_value_length(values["head_dim"])
    if "sliding_window" in values:
        writer.add_sliding_window(values["sliding_window"])
    if count := values.get("num_experts", values.get("num_local_experts")):
        writer.add_expert_count(count)
        writer.add_expert_used_count(values["num_experts_per_tok"])
    if "moe_intermediate_size" in values:
        writer.add_expert_feed_forward_length(values["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in values:
        writer.add_expert_shared_feed_forward_length(values["shared_expert_intermediate_size"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(values["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(values["final_logit_softcapping"])
    if architecture == "granite":
        writer.add_attention_scale(values["attention_multiplier"])
        writer.add_embedding_scale(values["embedding_multiplier"])
        writer.add_residual_scale(values["residual_multiplier"])
        writer.add_logit_scale(values["logits_scaling"])
    if architecture == "command-r":
        writer.add_logit_scale(values["logit_scale"])
    if architecture == "stablelm":
        rotated = values["rope_parameters"]["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(rotated * (values["hidden_size"] // values["num_attention_heads"])))
        writer.add_parallel_residual(False)
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(values["original_max_position_embeddings"])


def _merged(architecture: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the converter names and arranges them, experts stacked."""
    arch = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, values["num_hidden_layers"])
    heads = {"q_proj": values["num_attention_heads"], "k_proj": values["num_key_value_heads"]}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        before, found, after = name.partition(".experts.")
        stem = f"{before}.experts.{after.partition('.')[2]}" if found else name
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if architecture in ("llama", "granite") and (count := heads.get(name.split(".")[-2])):
            halves = tensor.reshape(count, 2, -1, *tensor.shape[1:])
            tensor = torch.stack((halves[:, 0], halves[:, 1]), 2).reshape(tensor.shape)
        stacks.setdefault(str(names.get_name(stem, (".weight", ".bias"))), []).append(tensor)
    merged = {name: torch.stack(group) if "_exps" in name else group[0] for name, group in stacks.items()}
    return {name: one.squeeze(0) if name.endswith("ffn_gate_inp_shexp.weight") else one for name, one in merged.items()}


def add_bytes(writer: gguf.GGUFWriter, name: str, data: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    """A tensor of blocks that are given as bytes [rows, bytes of a row]."""
    writer.add_tensor(name, data, raw_dtype=kind)

"""GGUF files of tiny models, written by the gguf package with its names: what llama.cpp's converter would write."""

import copy
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

_HALF = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.5}}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e4,
    "factor": 4.0,
    "beta_fast": 8.0,
    "original_max_position_embeddings": 12,
}
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_GROUPS = {
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
}
_GRANITE = {name: value for name, value in MODELS["granite"].items() if name.endswith(("multiplier", "scaling"))}
_FOUR = {"num_hidden_layers": 4, "layer_types": [*["sliding_attention"] * 3, "full_attention"], "sliding_window": 8}
MODELS |= {
    "smollm3": {"model_type": "smollm3", **_BASE, **_ROPE, "num_hidden_layers": 4, "pad_token_id": 0},
    "arcee": {"model_type": "arcee", **_BASE, "rope_parameters": _YARN, "mlp_bias": True, "attention_bias": True},
    "ernie4_5": {"model_type": "ernie4_5", **_BASE, **_ROPE, "head_dim": 32, "use_bias": True},
    "exaone4": {"model_type": "exaone4", **_BASE, **_ROPE, **_SLIDING},
    "glm4": {"model_type": "glm4", **_BASE, **_HALF, "attention_bias": True, "head_dim": 16, "pad_token_id": 0},
    "olmo": {"model_type": "olmo", **_BASE, **_ROPE, "clip_qkv": 0.5},
    "olmo3": {
        "model_type": "olmo3",
        **_BASE,
        **_SLIDING,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE["rope_parameters"]),
    },
    "phi2": {
        "model_type": "phi",
        **_BASE,
        **_HALF,
        "layer_norm_eps": 1e-5,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
    },
    "nemotron": {"model_type": "nemotron", **_BASE, **_HALF, "norm_eps": 1e-5},
    "jais2": {"model_type": "jais2", **_BASE, **_ROPE, "layer_norm_eps": 1e-5, "head_dim": 32},
    "cohere2": {
        "model_type": "cohere2",
        **_BASE,
        **_ROPE,
        **_FOUR,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.25,
        "tie_word_embeddings": True,
        "head_dim": 16,
    },
    "lfm2": {
        "model_type": "lfm2",
        **_BASE,
        **_ROPE,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "tie_word_embeddings": True,
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2moe": {
        "model_type": "lfm2_moe",
        **_BASE,
        **_ROPE,
        **_ROUTED,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "tie_word_embeddings": True,
    },
    "ernie4_5-moe": {
        "model_type": "ernie4_5_moe",
        **_BASE,
        **_ROPE,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
    },
    "glm4moe": {
        "model_type": "glm4_moe",
        **_BASE,
        **_HALF,
        **_GROUPS,
        "attention_bias": True,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
        "pad_token_id": 0,
    },
    "dots1": {"model_type": "dots1", **_BASE, **_ROPE, **_GROUPS, "sliding_window": None},
    "exaone-moe": {
        "model_type": "exaone_moe",
        **_BASE,
        **_ROPE,
        **_SLIDING,
        **_ROUTED,
        "num_shared_experts": 1,
        "n_group": 3,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "granitemoe": {
        "model_type": "granitemoeshared",
        **_BASE,
        **_ROPE,
        **_GRANITE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
    },
    "afmoe": {
        "model_type": "afmoe",
        **_BASE,
        **_ROPE,
        **_FOUR,
        **_ROUTED,
        "num_shared_experts": 1,
        "num_dense_layers": 1,
        "route_scale": 1.5,
        "mup_enabled": True,
        "head_dim": 16,
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        **_BASE,
        "rope_parameters": _YARN | {"beta_slow": 2.0, "truncate": False},
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "llama4": {
        "model_type": "llama4_text",
        **_BASE,
        **_ROPE,
        "intermediate_size_mlp": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "head_dim": 16,
        "moe_layers": [1],
    },
    "minimax-m2": {
        "model_type": "minimax_m2",
        **_BASE,
        **_HALF,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "rotary_dim": 8,
    },
    "deepseek2": {
        "model_type": "deepseek_v3",
        **_BASE,
        **_GROUPS,
        **_LATENT,
        "num_nextn_predict_layers": 0,
        "rope_parameters": _YARN | {"mscale": 0.5, "mscale_all_dim": 0.5},
    },
    "deepseek2-v2": {"model_type": "deepseek_v2", **_BASE, **_ROPE, **_GROUPS, **_LATENT, "norm_topk_prob": False}
    | {"topk_method": "group_limited_greedy"},
}
del MODELS["olmo"]["rms_norm_eps"]  # its norms have no weights, and an epsilon that is fixed
# names of cases that share an architecture
ARCHITECTURE_OF = {"mixtral": "llama", "olmo3": "olmo2", "deepseek2-v2": "deepseek2"}
LAYER_NORMS = ("stablelm", "starcoder2", "command-r", "cohere2", "olmo", "phi2", "nemotron", "jais2")
TURNED = ("llama", "granite", "smollm3", "arcee", "olmo", "granitemoe")  # llama.cpp's older order of rows


def tensors_of(values: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of the checkpoint of `model_of(values)`, by their Hugging Face names."""
    return {
        name: tensor.detach() for name, tensor in on_disk(model_of(copy.deepcopy(values))).items()
    }  # it writes into them


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
    architecture = ARCHITECTURE_OF.get(architecture, architecture)
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


Writes = Callable[[gguf.GGUFWriter, Any], object]
# what the converter writes for a field of config.json
_FIELDS: dict[str, Writes] = {
    "head_dim": lambda w, v: (w.add_key_length(v), w.add_value_length(v)),
    "sliding_window": lambda w, v: v and w.add_sliding_window(v),
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), lambda w, v: w.add_expert_count(v)
    ),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), lambda w, v: w.add_expert_used_count(v)),
    "moe_intermediate_size": lambda w, v: w.add_expert_feed_forward_length(v),
    **dict.fromkeys(
        ("shared_expert_intermediate_size", "shared_intermediate_size"),
        lambda w, v: w.add_expert_shared_feed_forward_length(v),
    ),
    **dict.fromkeys(
        ("num_shared_experts", "n_shared_experts", "moe_num_shared_experts"), lambda w, v: w.add_expert_shared_count(v)
    ),
    **dict.fromkeys(
        ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"),
        lambda w, v: w.add_leading_dense_block_count(v),
    ),
    "mlp_layer_types": lambda w, v: w.add_leading_dense_block_count(v.count("dense")),
    "n_group": lambda w, v: w.add_expert_group_count(v),
    "topk_group": lambda w, v: w.add_expert_group_used_count(v),
    **dict.fromkeys(("route_scale", "routed_scaling_factor"), lambda w, v: w.add_expert_weights_scale(v)),
    **dict.fromkeys(
        ("interleave_moe_layer_step", "moe_layer_interval"), lambda w, v: w.add_interleave_moe_layer_step(v)
    ),
    "attn_logit_softcapping": lambda w, v: w.add_attn_logit_softcapping(v),
    "final_logit_softcapping": lambda w, v: w.add_final_logit_softcapping(v),
    "attention_multiplier": lambda w, v: w.add_attention_scale(v),
    "embedding_multiplier": lambda w, v: w.add_embedding_scale(v),
    "residual_multiplier": lambda w, v: w.add_residual_scale(v),
    **dict.fromkeys(("logits_scaling", "logit_scale"), lambda w, v: w.add_logit_scale(v)),
    "clip_qkv": lambda w, v: w.add_clamp_kqv(v),
    "conv_L_cache": lambda w, v: w.add_shortconv_l_cache(v),
    "rotary_dim": lambda w, v: w.add_rope_dimension_count(v),
    "q_lora_rank": lambda w, v: w.add_q_lora_rank(v),
    "kv_lora_rank": lambda w, v: w.add_kv_lora_rank(v),
    "qk_rope_head_dim": lambda w, v: w.add_rope_dimension_count(v),
    "original_max_position_embeddings": lambda w, v: w.add_rope_scaling_orig_ctx_len(v),
}
_ROPE_FIELDS: dict[str, Writes] = {
    "rope_theta": lambda w, v: w.add_rope_freq_base(v),
    "factor": lambda w, v: w.add_rope_scaling_factor(v),
    "original_max_position_embeddings": lambda w, v: w.add_rope_scaling_orig_ctx_len(v),
    "beta_fast": lambda w, v: w.add_rope_scaling_yarn_beta_fast(v),
    "beta_slow": lambda w, v: w.add_rope_scaling_yarn_beta_slow(v),
    "mscale_all_dim": lambda w, v: w.add_rope_scaling_yarn_log_mul(0.1 * v),
}


def _write_metadata(writer: gguf.GGUFWriter, architecture: str, values: Mapping[str, Any]) -> None:
    heads, kinds = values["num_attention_heads"], values.get("layer_types", [])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_block_count(values["num_hidden_layers"])
    writer.add_feed_forward_length(values.get("intermediate_size_mlp", values["intermediate_size"]))
    writer.add_head_count(heads)
    key_heads = 1 if "kv_lora_rank" in values else values["num_key_value_heads"]
    writer.add_head_count_kv([key_heads * (kind != "conv") for kind in kinds] if "conv" in kinds else key_heads)
    if architecture in LAYER_NORMS:
        writer.add_layer_norm_eps(values.get("rms_norm_eps", 1e-5))
    else:
        writer.add_layer_norm_rms_eps(values.get("rms_norm_eps", 1e-5))
    for name, write in _FIELDS.items():
        if name in values:
            write(writer, values[name])
    rope = values["rope_parameters"]
    rope = rope.get("full_attention", rope)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
    for name, write in _ROPE_FIELDS.items():
        if name in rope and (name == "rope_theta" or rope["rope_type"] in ("linear", "yarn")):
            write(writer, rope[name])
    if "partial_rotary_factor" in rope and "rotary_dim" not in values:
        head_dim = values.get("head_dim", values["hidden_size"] // heads)
        writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim))
    if architecture in ("exaone4", "exaone-moe", "olmo2") and kinds:
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    if architecture == "stablelm":
        writer.add_parallel_residual(False)
    if architecture in ("gpt-oss", "llama4", "minimax-m2"):
        writer.add_expert_feed_forward_length(values["intermediate_size"])
    if architecture in ("afmoe", "glm4moe", "lfm2moe", "minimax-m2"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "kv_lora_rank" in values:
        latent, rotated = values["kv_lora_rank"], values["qk_rope_head_dim"]
        writer.add_key_length(latent + rotated)
        writer.add_value_length(latent)
        writer.add_key_length_mla(values["qk_nope_head_dim"] + rotated)
        writer.add_value_length_mla(values["v_head_dim"])
    if "norm_topk_prob" in values and "n_group" in values:
        writer.add_expert_weights_norm(values["norm_topk_prob"])


def _merged(architecture: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as the converter names and arranges them, experts stacked."""
    arch = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, values["num_hidden_layers"])
    heads = {"q_proj": values["num_attention_heads"], "k_proj": values["num_key_value_heads"]}
    stacks: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        if (cut := _cut(name, tensor, values)) is not None:
            layer = name.split(".")[2]
            stacks |= {f"blk.{layer}.{module}": [one] for module, one in cut.items()}
            continue
        before, found, after = name.partition(".experts.")
        stem = f"{before}.experts.{after.partition('.')[2]}" if found else name
        if architecture == "lfm2moe":
            stem = stem.replace("feed_forward.experts", "block_sparse_moe.experts")
        if (architecture.startswith("gemma") or architecture == "nemotron") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if architecture in TURNED and (count := heads.get(name.split(".")[-2])):
            halves = tensor.reshape(count, 2, -1, *tensor.shape[1:])
            tensor = torch.stack((halves[:, 0], halves[:, 1]), 2).reshape(tensor.shape)
        stacks.setdefault(str(names.get_name(stem, (".weight", ".bias"))), []).append(tensor)
    merged = {name: torch.stack(group) if len(group) > 1 else group[0] for name, group in stacks.items()}
    return {name: one.squeeze(0) if name.endswith("ffn_gate_inp_shexp.weight") else one for name, one in merged.items()}


def _cut(name: str, tensor: Tensor, values: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """{name in the layer: tensor} of what the converter cuts, transposes or names by itself; None for others."""
    if name.endswith(("expert_bias", "e_score_correction_bias")):
        return {"exp_probs_b.bias": tensor.squeeze()}
    if name.endswith("self_attn.sinks"):
        return {"attn_sinks.weight": tensor}
    if name.endswith("conv.conv.weight"):
        return {"shortconv.conv.weight": tensor.squeeze(1)}
    if name.endswith("kv_b_proj.weight"):
        rows = tensor.view(values["num_attention_heads"], -1, tensor.shape[1])
        keys, of_values = rows.split((values["qk_nope_head_dim"], values["v_head_dim"]), 1)
        return {"attn_k_b.weight": keys.transpose(1, 2), "attn_v_b.weight": of_values}
    if name.endswith("input_linear.weight"):
        kind = "shexp" if "shared" in name else "exps"
        gate, up = tensor.chunk(2, -2)
        return {f"ffn_gate_{kind}.weight": gate, f"ffn_up_{kind}.weight": up}
    if name.endswith(("experts.gate_up_proj", "experts.gate_up_proj_bias")):
        end = "bias" if name.endswith("bias") else "weight"
        columns = tensor if end == "bias" else tensor.transpose(1, 2)
        gate, up = columns.chunk(2, 1) if values["model_type"] == "llama4_text" else (columns[:, ::2], columns[:, 1::2])
        return {f"ffn_gate_exps.{end}": gate, f"ffn_up_exps.{end}": up}
    if name.endswith(("experts.down_proj", "experts.down_proj_bias")):
        is_bias = name.endswith("bias")
        return {"ffn_down_exps.bias": tensor} if is_bias else {"ffn_down_exps.weight": tensor.transpose(1, 2)}
    return None


def add_bytes(writer: gguf.GGUFWriter, name: str, data: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
    """A tensor of blocks that are given as bytes [rows, bytes of a row]."""
    writer.add_tensor(name, data, raw_dtype=kind)

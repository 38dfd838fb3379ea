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
# names of cases that share an architecture
ARCHITECTURE_OF = {"mixtral": "llama", "olmo3": "olmo2", "deepseek2-v2": "deepseek2"}
OFFSET = ("gemma", "nemotron", "qwen3next", "qwen35")  # norms whose weights are written with 1 added
LAYER_NORMS = ("stablelm", "starcoder2", "command-r", "cohere2", "olmo", "phi2", "nemotron", "jais2")
TURNED = (
    "llama",
    "granite",
    "smollm3",
    "arcee",
    "olmo",
    "granitemoe",
    "granitehybrid",
    "mistral3",
)  # llama.cpp's older order of rows


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
    "linear_conv_kernel_dim": lambda w, v: w.add_ssm_conv_kernel(v),
    "linear_key_head_dim": lambda w, v: w.add_ssm_state_size(v),
    "linear_num_key_heads": lambda w, v: w.add_ssm_group_count(v),
    "linear_num_value_heads": lambda w, v: (w.add_ssm_time_step_rank(v), w.add_full_attention_interval(4)),
    "mamba_d_conv": lambda w, v: w.add_ssm_conv_kernel(v),
    "mamba_d_state": lambda w, v: w.add_ssm_state_size(v),
    "mamba_n_groups": lambda w, v: w.add_ssm_group_count(v),
    "mamba_n_heads": lambda w, v: w.add_ssm_time_step_rank(v),
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
}


def _write_metadata(writer: gguf.GGUFWriter, architecture: str, values: Mapping[str, Any]) -> None:
    heads, kinds = values["num_attention_heads"], values.get("layer_types", [])
    writer.add_context_length(values["max_position_embeddings"])
    writer.add_embedding_length(values["hidden_size"])
    writer.add_block_count(values["num_hidden_layers"])
    if "intermediate_size" in values:
        writer.add_feed_forward_length(values.get("intermediate_size_mlp", values["intermediate_size"]))
    writer.add_head_count(heads)
    key_heads = 1 if "kv_lora_rank" in values else values["num_key_value_heads"]
    without = {"conv", "mamba"} & set(kinds)
    writer.add_head_count_kv([key_heads * (kind not in without) for kind in kinds] if without else key_heads)
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
    if "mscale_all_dim" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"] * (1 if architecture == "mistral3" else 0.1))
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    if "linear_value_head_dim" in values:
        writer.add_ssm_inner_size(values["linear_value_head_dim"] * values["linear_num_value_heads"])
    if "mamba_d_head" in values:
        writer.add_ssm_inner_size(values["mamba_d_head"] * values["mamba_n_heads"])
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
        if architecture.startswith(OFFSET) and name.endswith("norm.weight"):
            tensor = tensor + 1
        if architecture in TURNED and (count := heads.get(name.split(".")[-2])):
            halves = tensor.reshape(count, 2, -1, *tensor.shape[1:])
            tensor = torch.stack((halves[:, 0], halves[:, 1]), 2).reshape(tensor.shape)
        stacks.setdefault(str(names.get_name(stem, (".weight", ".bias"))), []).append(tensor)
    merged = {name: torch.stack(group) if len(group) > 1 else group[0] for name, group in stacks.items()}
    return {name: one.squeeze(0) if name.endswith("ffn_gate_inp_shexp.weight") else one for name, one in merged.items()}


def _tiled(tensor: Tensor, values: Mapping[str, Any], size: int) -> Tensor:
    """Heads of values with the first of each key first, then the second ones, as llama.cpp repeats keys."""
    if values["model_type"] == "qwen3_next":
        return tensor
    keys = values["linear_num_key_heads"]
    return torch.cat([tensor.view(keys, -1, size, *tensor.shape[1:])[:, i] for i in range(6 // keys)]).flatten(0, 1)


def _of_state(name: str, tensor: Tensor, values: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """{name in the layer: tensor} of layers that keep a state."""
    if ".mamba." in name:
        module = name.partition(".mamba.")[2]
        groups = values["mamba_n_groups"]
        return {
            "A_log": {"ssm_a": -tensor.exp()[:, None]},
            "D": {"ssm_d": tensor[:, None]},
            "dt_bias": {"ssm_dt.bias": tensor},
            "conv1d.weight": {"ssm_conv1d.weight": tensor.squeeze()},
            "conv1d.bias": {"ssm_conv1d.bias": tensor},
            "norm.weight": {"ssm_norm.weight": tensor.view(groups, -1) if tensor.ndim == 1 else tensor},
            "in_proj.weight": {"ssm_in.weight": tensor},
            "out_proj.weight": {"ssm_out.weight": tensor},
        }[module]
    if ".linear_attn." not in name:
        return None
    module, size = name.partition(".linear_attn.")[2], values["linear_value_head_dim"]
    before = 2 * values["linear_num_key_heads"] * values["linear_key_head_dim"]
    if module == "in_proj_qkvz.weight":
        key = values["linear_key_head_dim"]
        wide = tensor.shape[0] // values["linear_num_key_heads"]
        by_key = tensor.view(-1, wide, tensor.shape[1])
        cuts = by_key.split((key, key, (wide - 2 * key) // 2, (wide - 2 * key) // 2), 1)
        q, k, v, z = (one.flatten(0, 1) for one in cuts)
        return {"attn_qkv.weight": torch.cat((q, k, v)), "attn_gate.weight": z}
    if module in ("in_proj_qkv.weight", "conv1d.weight"):
        wide = torch.cat((tensor[:before], _tiled(tensor[before:], values, size)))
        return {"attn_qkv.weight" if "proj" in module else "ssm_conv1d.weight": wide.squeeze(1)}
    one = {
        "in_proj_z.weight": ("attn_gate.weight", size),
        "in_proj_a.weight": ("ssm_alpha.weight", 1),
        "in_proj_b.weight": ("ssm_beta.weight", 1),
        "dt_bias": ("ssm_dt.bias", 1),
    }
    if module in one:
        return {one[module][0]: _tiled(tensor, values, one[module][1])}
    if module == "A_log":
        return {"ssm_a": _tiled(-tensor.exp(), values, 1)}
    if module == "out_proj.weight":
        return {"ssm_out.weight": _tiled(tensor.T.contiguous(), values, size).T}
    return {"ssm_norm.weight": tensor} if module == "norm.weight" else {"ssm_ba.weight": tensor}


def _cut(name: str, tensor: Tensor, values: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """{name in the layer: tensor} of what the converter cuts, transposes or names by itself; None for others."""
    if (state := _of_state(name, tensor, values)) is not None:
        return state
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

"""Tiny models in the form of their publishers' quantized files: names, dtypes, blocks and declarations.

V4's tensors are those of the headers of DeepSeek-V4-Flash, as inventories of its public files list them: every fp8
weight has X.scale in blocks of 128 x 128, experts are bytes of two 4-bit floats with a scale for each 32 inputs, and
config.json says so in `expert_dtype`, beside its quantization_config.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.params.quantized.stored_forms import Maker, fp4, fp8, fp8_tensor, of_table
from tests.variants import deepseek_v4, deepseek_v41, glm5_next, hy_v4, inkling2, minimax_m3, mistral_large4, qwen4_exp

Values = Mapping[str, Any]


@dataclass(frozen=True)
class Published:
    """A model of a tiny config.json whose tensors are quantized where a pattern fits their names.

    values: of config.json without its quantization, declared: with which fields. forms: {pattern of the module's name:
    how its weight is stored, None: as it is}, of which the first that fits counts. kept: patterns of leaves that
    stay as stored.
    """

    values: Values
    declared: Values
    forms: Mapping[str, Maker | None]
    kept: tuple[str, ...]

    def maker(self, name: str) -> Maker | None:
        return next((maker for pattern, maker in self.forms.items() if re.fullmatch(pattern, name)), None)

    def stored(self, plain: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """(the tensors of the file, {name of each quantized weight: its values in fp32}). plain: of a save in bf16."""
        tensors: dict[str, Tensor] = {}
        wanted: dict[str, Tensor] = {}
        for seed, (name, tensor) in enumerate(plain.items()):
            maker = self.maker(name)
            if maker is None:
                tensors[name] = tensor.to(torch.bfloat16) if name.endswith("norm.weight") else tensor
                continue
            parts, wanted[name] = maker(tuple(tensor.shape), seed)
            for ending, part in parts.items():
                module = name if not ending or ending.startswith("_") else name.rpartition(".")[0] + "."
                full = re.sub(r"\.shard_\d+\.(?=weight_scale$)", ".", module + ending)  # of all shards of a table
                tensors[full] = part
        return tensors, wanted


_V4: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 192,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "q_lora_rank": 96,
    "o_lora_rank": 48,
    "o_groups": 2,
    "sliding_window": 6,
    "index_n_heads": 4,
    "index_head_dim": 64,
    "index_topk": 3,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 4096,
    "compress_ratios": [0, 4, 128, 4, 0],
    "num_hash_layers": 1,
}
_UE8M0 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0"}
_BLOCKS = fp8((128, 128), "weight", "scale")
_V4_FP8 = r".*\.(wq_a|wq_b|wkv|wo_a|wo_b|shared_experts\.w[123])\.weight|mtp\.0\.[eh]_proj\.weight"
_V4_KEPT = (
    r".*\.(q_a_proj|q_b_proj|attention\.kv_proj|o_b_proj)",
    r".*\.(experts|shared_expert)\.(gate_proj|down_proj|up_proj)",
    r"mtp\.0\.[eh]_proj",
)


def _v4(experts: str, maker: Maker) -> Published:
    return Published(
        deepseek_v4.published()["deepseek_v4_flash"] | _V4 | {"expert_dtype": experts},
        {"quantization_config": _UE8M0 | {"weight_block_size": [128, 128]}, "expert_dtype": experts},
        {
            r".*\.compressor\..*": None,  # bf16, also where the last part of its name is that of a quantized one
            r".*\.ffn\.experts\.\d+\.w[123]\.weight": maker,
            _V4_FP8: _BLOCKS,
        },
        _V4_KEPT,
    )


# DeepSeek V4.1's tables have a scale for each 32 numbers of a row, where other weights have one for 32 x 32.
_V41 = deepseek_v41.TEXT | {"hidden_size": 96, "moe_intermediate_size": 64, "head_dim": 64, "qk_rope_head_dim": 16}
_V41 |= {"q_lora_rank": 96, "o_lora_rank": 32, "index_n_heads": 4, "index_head_dim": 32, "engram_head_dim": 64}


def _v41() -> Published:
    squares = fp8((32, 32), "weight", "scale")
    return Published(
        _V41 | {"expert_dtype": "fp4"},
        {"quantization_config": _UE8M0 | {"weight_block_size": [32, 32]}, "expert_dtype": "fp4"},
        {
            r".*\.compressor\..*": None,
            r".*\.ffn\.experts\.\d+\.w[123]\.weight": fp4("weight", "scale"),
            r".*\.engram\.embed\.weight": fp8((1, 32), "weight", "scale"),
            r".*\.engram\.wkv\.weight": squares,
            _V4_FP8: squares,
        },
        (*_V4_KEPT[:2], r".*\.ngrams\.(key|value)_proj"),
    )


_BYTES = torch.uint8
_LINEAR = r".*\.(mlp|experts|\d+|shared_experts?|self_attn|linear_attn)\.\w+_proj\w*\.weight"
_LATENT = {"hidden_size": 160, "moe_intermediate_size": 96, "intermediate_size": 192, "kv_lora_rank": 64}
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
_MXFP8 = {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}
_UNCONVERTED = {"modules_to_not_convert": ["lm_head", "model.embed_tokens"]}

_QWEN = qwen4_exp.TINY | qwen4_exp.NGRAMS | {"hidden_size": 160, "moe_intermediate_size": 96}
_QWEN |= {"shared_expert_intermediate_size": 160, "ple_embed_dim": 32}
_M3 = {n: v for n, v in minimax_m3.TINY.items() if n != "model_type"} | {"hidden_size": 64, "intermediate_size": 96}
_M3 |= {"shared_intermediate_size": 96, "dense_intermediate_size": 192}
_INKLING: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 32}
_MLP = r".*\.mlp\.(experts\.|shared_expert\.)?(gate|up|down)_proj"

PUBLISHED: dict[str, Published] = {
    "DeepSeek-V4-Flash": _v4("fp4", fp4("weight", "scale")),
    "DeepSeek V4 with experts in fp8": _v4("fp8", _BLOCKS),
    "DeepSeek-V4.1-Flash": _v41(),
    "GLM-5.3-Flash": Published(
        glm5_next.TINY | _LATENT,
        {"quantization_config": _FP8 | _UNCONVERTED},
        {r".*\.[bfg]_\w*proj\.weight": None, _LINEAR: fp8((128, 128), "weight", "weight_scale_inv", None)},
        (r".*\.attention\.([qkvo]_proj|q_[ab]_proj|kv_a_proj)", _MLP),
    ),
    "Qwen3.8-Flash-Next-FP8": Published(
        _QWEN | {"ple_embedding_dtype": "float8_e4m3fn"},
        {"quantization_config": _FP8 | {"modules_to_convert": ["ngram_embedding"]}},
        {
            r".*\.ngram_embedding\.shard_\d+\.weight": of_table(),
            r".*\.(in_proj_[ab]|shared_expert_gate)\.weight": None,
            r".*\.(\d+|shared_expert|linear_attn|self_attn)\.\w+_proj\w*\.weight": fp8(
                (128, 128), "weight", "weight_scale_inv", None
            ),
        },
        (r"layers\.[01]\.attention\.[zo]_proj|layers\.2\.attention\.[kvo]_proj", _MLP),
    ),
    "MiniMax-M3-MXFP8": Published(
        {"model_type": "minimax_m3_vl", "text_config": _M3},
        {"quantization_config": _MXFP8 | {"ignored_layers": ["lm_head", "model.embed_tokens"]}},
        {
            r".*\.(layers\.\d+\.mlp|\d+|shared_experts|self_attn)\.(\w+_proj|w[123])\.weight": fp8(
                (1, 32), "weight", "weight_scale_inv", _BYTES
            )
        },
        (r".*\.attention\.(indexer\.)?[qkvo]_proj", _MLP),
    ),
    "Hy4-preview-FP8": Published(
        hy_v4.TINY | _LATENT | {"q_lora_rank": 64},
        {"quantization_config": {"quant_method": "mxfp8", "ignored_layers": ["lm_head"], "kv_cache_quant_algo": None}},
        {
            r".*\.experts\.\w+_proj": fp8((1, 32), "", "_scale", _BYTES),
            r".*\.(mlp|shared_experts)\.\w+_proj\.weight|.*\.q_[ab]_proj\.weight": fp8(
                (1, 32), "weight", "weight_scale", _BYTES
            ),
        },
        (r".*\.attention\.q_[ab]_proj", _MLP),
    ),
    "Inkling-2-Small-MXFP8": Published(
        inkling2.TINY | _INKLING,
        {"quantization_config": {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]}},
        {r".*\.experts\.w\d+_weight": fp8((1, 32), "", "_scale", _BYTES)},
        (r".*\.experts\.\w+_proj",),
    ),
    "Mistral-Large-4": Published(
        mistral_large4.TINY | _LATENT,
        {"quantization_config": _FP8},
        {r".*\.(wq|wo|wkv_a_with_mqa|w[123])\.weight": fp8((128, 128), "weight", "qscale_weight", None)},
        (r".*\.attention\.(q|o|kv_a)_proj", _MLP),
    ),
    "Mistral's files, by tensor": Published(
        mistral_large4.TINY | _LATENT,
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}},
        {r".*\.(wq|wo|wkv_a_with_mqa|w[123])\.weight": fp8_tensor("weight", "qscale_weight", (), "qscale_act")},
        (r".*\.attention\.(q|o|kv_a)_proj", _MLP),
    ),
}

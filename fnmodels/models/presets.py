"""Published sizes as data: `fnmodels.preset("qwen3-0.6b") -> config`, without any file.

Each preset holds the dimensions from the model's own config.json, in the published dialect; the family reads it like
the file. Parameter counts are tested against the published totals, or against the rounded one if only that is published
(GLM-4 32B, Ministral 3 8B and 14B, Qwen 2 57B-A14B). Sizes of a family alone stand at the end of its own file.
"""

import difflib
import importlib
from typing import Any, cast

from fnmodels.models.common.config_json import ConfigJson
from fnmodels.models.common.family import Family
from fnmodels.models.common.registry import claim, every_model, family_reading, towers


def preset(name: str) -> Any:
    """The Config of a published model.

    Args:
        name: A name of `presets()`.

    Returns:
        The Config of its family.

    Raises:
        ValueError: The name is unknown; it lists similar ones.
    """
    known = published()
    if name not in known:
        near = difflib.get_close_matches(name.lower(), known, n=5, cutoff=0.4)
        hint = f"near it are {', '.join(near)}" if near else f"there are {', '.join(presets())}"
        raise ValueError(f"There is no preset {name!r}; {hint}.")
    values = known[name]
    return family_reading(values).Config.from_hf(values)


def presets() -> tuple[str, ...]:
    """The names of all published sizes, for `preset`.

    Returns:
        The names, sorted.
    """
    return tuple(sorted(published()))


def published() -> dict[str, ConfigJson]:
    """{name: config.json} of this file and of each family's PRESETS; UserError where two of them claim one name."""
    owners, found = dict.fromkeys(PRESETS, __name__), dict(PRESETS)
    for module in dict.fromkeys((*every_model().values(), *towers().values())):
        family = cast(Family, importlib.import_module(module))
        for name, values in getattr(family, "PRESETS", {}).items():
            claim(owners, name, module, "preset")
            found[name] = values
    return found


def _sized(
    base: ConfigJson, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, **rest: Any
) -> ConfigJson:
    return base | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **rest,
    }


_TIED = {"tie_word_embeddings": True}
_32K = {"max_position_embeddings": 32768}
_LLAMA2 = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
_ROPE3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3 = {"model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}
_LLAMA31 = _LLAMA3 | {"max_position_embeddings": 131072, "rope_scaling": _ROPE3 | {"factor": 8.0}}
_LLAMA32 = _LLAMA3 | {"max_position_embeddings": 131072, "rope_scaling": _ROPE3 | {"factor": 32.0}} | _TIED
_SMOLLM2 = {"model_type": "llama", "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 100000} | _TIED
_SMOLLM2 |= {"max_position_embeddings": 8192}
_MISTRAL = {
    "model_type": "mistral",
    "vocab_size": 32768,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
}
_MINISTRAL = _MISTRAL | {"model_type": "ministral", "vocab_size": 131072, "head_dim": 128, "rope_theta": 1e8}
_MINISTRAL |= {"max_position_embeddings": 32768, "sliding_window": 32768}
_MINISTRAL |= {"layer_types": ["full_attention", *["sliding_attention"] * 3] * 9}
_QWEN2 = {"model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 32768}
_QWEN2S, _QWEN2L = _QWEN2 | {"vocab_size": 151936} | _TIED, _QWEN2 | {"vocab_size": 152064}
_QWEN3 = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_QWEN3 |= {"max_position_embeddings": 40960}
_SMOLLM3 = {"model_type": "smollm3", "vocab_size": 128256, "rms_norm_eps": 1e-6, "rope_theta": 5e6}
_SMOLLM3 |= {"max_position_embeddings": 65536}
_GEMMA = {"model_type": "gemma", "vocab_size": 256000, "head_dim": 256, "max_position_embeddings": 8192}
_GEMMA2 = _GEMMA | {"model_type": "gemma2", "sliding_window": 4096}
_GEMMA3 = {"model_type": "gemma3_text", "vocab_size": 262144, "head_dim": 256, "query_pre_attn_scalar": 256}
_GEMMA3 |= {"max_position_embeddings": 32768, "sliding_window": 512}
# The text model of a checkpoint with a vision tower.
_GEMMA3_TEXT = _GEMMA3 | {"vocab_size": 262208, "max_position_embeddings": 131072, "sliding_window": 1024}
_GEMMA3_TEXT |= {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
# The text models of checkpoints with other towers. Every sixth layer is full if not said otherwise.
_GEMMA4 = {"model_type": "gemma4_text", "vocab_size": 262144, "head_dim": 256, "final_logit_softcapping": 30.0}
_GEMMA4_E = _GEMMA4 | {"hidden_size_per_layer_input": 256, "sliding_window": 512}
_GEMMA4 |= {"hidden_size_per_layer_input": 0, "sliding_window": 1024, "max_position_embeddings": 262144}
_GEMMA4 |= {"attention_k_eq_v": True, "use_bidirectional_attention": "vision"}
_EVERY_FIFTH = (["sliding_attention"] * 4 + ["full_attention"]) * 7
_EXPERTS_26B = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
_OLMO2 = {"model_type": "olmo2", "vocab_size": 100352, "rms_norm_eps": 1e-6, "rope_theta": 500000}
_OLMO2 |= {"max_position_embeddings": 4096}
_OLMO3_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32,
    "beta_slow": 1,
}
_OLMO3_YARN |= {"attention_factor": 1.2079441541679836}
_OLMO3 = {"model_type": "olmo3", "vocab_size": 100278, "rms_norm_eps": 1e-6, "rope_theta": 500000}
_OLMO3 |= {"max_position_embeddings": 65536, "sliding_window": 4096, "rope_scaling": _OLMO3_YARN}
_GRANITE = {"model_type": "granite", "vocab_size": 49155, "rms_norm_eps": 1e-5, "rope_theta": 1e7} | _TIED
_GRANITE |= {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "max_position_embeddings": 131072}
_GRANITE |= {"attention_dropout": 0.1}
_COHERE = {"model_type": "cohere", "vocab_size": 256000, "layer_norm_eps": 1e-5, "max_position_embeddings": 8192}
_AYA = _COHERE | {"rope_theta": 10000}
_COHERE2 = {"model_type": "cohere2", "vocab_size": 256000, "head_dim": 128, "layer_norm_eps": 1e-5, "rope_theta": 50000}
_COHERE2 |= {
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "max_position_embeddings": 131072,
    "logit_scale": 0.25,
}
_FALCON3 = {"model_type": "llama", "vocab_size": 131072, "head_dim": 256, "rms_norm_eps": 1e-6, "rope_theta": 1000042}
_FALCON3 |= {"max_position_embeddings": 32768, "activation": "swiglu"}
_GPT2 = {"model_type": "gpt2", "vocab_size": 50257, "n_positions": 1024, "n_ctx": 1024}
_STARCODER2 = {"model_type": "starcoder2", "vocab_size": 49152, "max_position_embeddings": 16384}
_STARCODER2 |= {"sliding_window": 4096, "use_bias": True, "norm_epsilon": 1e-5}
_STARCODER2 |= {"attention_dropout": 0.1, "embedding_dropout": 0.1, "residual_dropout": 0.1}
_STABLELM = {"model_type": "stablelm", "vocab_size": 100352, "max_position_embeddings": 4096, "layer_norm_eps": 1e-5}
_STABLELM |= {"rope_theta": 10000, "partial_rotary_factor": 0.25}
_GLM4 = {"model_type": "glm4", "vocab_size": 151552, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
_GLM4 |= {"max_position_embeddings": 32768, "partial_rotary_factor": 0.5}
# DeepSeek: config.json of deepseek-ai/DeepSeek-V2-Lite, DeepSeek-V2, DeepSeek-V3 and DeepSeek-R1 (arXiv 2405.04434,
# 2412.19437); of moonshotai/Kimi-K2-Instruct (arXiv 2507.20534) and Moonlight-16B-A3B (arXiv 2502.16982).
_YARN40: ConfigJson = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
_LATENT: ConfigJson = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_LATENT |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 163840}
_DEEPSEEK2: ConfigJson = _LATENT | {"model_type": "deepseek_v2", "vocab_size": 102400, "scoring_func": "softmax"}
_DEEPSEEK2 |= {"n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1, "norm_topk_prob": False}
_DEEPSEEK2 |= {"rope_scaling": _YARN40 | {"mscale": 0.707, "mscale_all_dim": 0.707}}
_DEEPSEEK3: ConfigJson = _LATENT | {"model_type": "deepseek_v3", "vocab_size": 129280, "scoring_func": "sigmoid"}
_DEEPSEEK3 |= {"topk_method": "noaux_tc", "norm_topk_prob": True, "n_shared_experts": 1, "num_experts_per_tok": 8}
_DEEPSEEK3 |= {"moe_intermediate_size": 2048, "n_routed_experts": 256, "n_group": 8, "topk_group": 4}
_DEEPSEEK3 |= {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1}
_DEEPSEEK3 |= {"rope_scaling": _YARN40 | {"mscale": 1.0, "mscale_all_dim": 1.0}}
_MOONSHOT: ConfigJson = _DEEPSEEK3 | {
    "vocab_size": 163840,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MOONSHOT |= {"num_nextn_predict_layers": 0, "rope_theta": 50000.0}
_KIMI: ConfigJson = {"model_type": "kimi_k2", "n_routed_experts": 384, "routed_scaling_factor": 2.827}
_KIMI |= {"max_position_embeddings": 131072}
_KIMI |= {"rope_scaling": _DEEPSEEK3["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0}}
_MOONLIGHT: ConfigJson = {
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1408,
}
_MOONLIGHT |= {"q_lora_rank": None, "routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5, "rope_scaling": None}
_MOONLIGHT |= {"max_position_embeddings": 8192}
# config.json of zai-org/GLM-4.5 and GLM-4.5-Air (arXiv 2508.06471)
_GLM45: ConfigJson = {
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_GLM45 |= {"partial_rotary_factor": 0.5, "attention_bias": True, "norm_topk_prob": True, "num_experts_per_tok": 8}
_GLM45 |= {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1}
_GLM45 |= {"max_position_embeddings": 131072}
# config.json of deepseek-ai/DeepSeek-V3.2-Exp, and of zai-org/GLM-5 and GLM-5.2
_DEEPSEEK32 = _DEEPSEEK3 | {"model_type": "deepseek_v32", "index_topk": 2048, "index_head_dim": 128}
_GLM5: ConfigJson = _DEEPSEEK32 | {"model_type": "glm_moe_dsa", "vocab_size": 154880, "index_n_heads": 32}
_GLM5 |= {"rope_scaling": None, "rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752}
_GLM5 |= {"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256, "n_group": 1, "topk_group": 1}
_GLM52 = {"rope_theta": 8e6, "max_position_embeddings": 1048576, "index_topk_freq": 4, "index_skip_topk_offset": 3}
_MISTRAL4_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 128.0, "llama_4_scaling_beta": 0.1}
_MISTRAL4_ROPE |= {"original_max_position_embeddings": 8192, "mscale": 1.0, "mscale_all_dim": 1.0}
_MINISTRAL3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
# The text model of a checkpoint with a vision tower.
_MINISTRAL3 = {"model_type": "ministral3", "vocab_size": 131072, "head_dim": 128, "rms_norm_eps": 1e-5}
_MINISTRAL3 |= {"max_position_embeddings": 262144, "rope_parameters": _MINISTRAL3_ROPE}
_MIXTRAL = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6}
_QWEN2M = _QWEN2 | {"model_type": "qwen2_moe", "vocab_size": 151936, "norm_topk_prob": False}
_QWEN3M = _QWEN3 | {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
_OLMOE = {"model_type": "olmoe", "vocab_size": 50304, "num_experts": 64, "num_experts_per_tok": 8}

_GPT_OSS = {"model_type": "gpt_oss", "vocab_size": 201088, "head_dim": 64, "num_experts_per_tok": 4}
_GPT_OSS |= {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000, "sliding_window": 128}
_GPT_OSS |= {
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
}
# The text model of a checkpoint with a vision tower; llama4_text is its model type when saved without the tower.
_LLAMA4 = _sized({"model_type": "llama4_text"}, 5120, 8192, 48, 40, 8, head_dim=128, intermediate_size_mlp=16384)
_LLAMA4 |= {"vocab_size": 202048}
_LLAMA4 |= {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "num_experts_per_tok": 1, "attention_chunk_size": 8192}
_SCOUT_ROPE = _ROPE3 | {"factor": 16.0, "high_freq_factor": 1.0}
_SCOUT = _LLAMA4 | {"num_local_experts": 16, "rope_scaling": _SCOUT_ROPE, "max_position_embeddings": 10485760}
_MAVERICK = _LLAMA4 | {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}
_MAVERICK |= {"max_position_embeddings": 1048576}


def _experts(number: int, chosen: int, inner: int, shared: int) -> ConfigJson:
    sizes = {"num_experts": number, "num_experts_per_tok": chosen, "moe_intermediate_size": inner}
    return sizes | {"shared_expert_intermediate_size": shared}


PRESETS: dict[str, ConfigJson] = {
    "llama-2-7b": _sized(_LLAMA2, 4096, 11008, 32, 32, 32),
    "llama-2-13b": _sized(_LLAMA2, 5120, 13824, 40, 40, 40),
    "llama-2-70b": _sized(_LLAMA2, 8192, 28672, 80, 64, 8),
    "llama-3-8b": _sized(_LLAMA3, 4096, 14336, 32, 32, 8, max_position_embeddings=8192),
    "llama-3-70b": _sized(_LLAMA3, 8192, 28672, 80, 64, 8, max_position_embeddings=8192),
    "llama-3.1-8b": _sized(_LLAMA31, 4096, 14336, 32, 32, 8),
    "llama-3.1-70b": _sized(_LLAMA31, 8192, 28672, 80, 64, 8),
    "llama-3.1-405b": _sized(_LLAMA31, 16384, 53248, 126, 128, 8),
    "llama-3.2-1b": _sized(_LLAMA32, 2048, 8192, 16, 32, 8, head_dim=64),
    "llama-3.2-3b": _sized(_LLAMA32, 3072, 8192, 28, 24, 8, head_dim=128),
    "llama-3.3-70b": _sized(_LLAMA31, 8192, 28672, 80, 64, 8),
    "smollm2-135m": _sized(_SMOLLM2, 576, 1536, 30, 9, 3),
    "smollm2-360m": _sized(_SMOLLM2, 960, 2560, 32, 15, 5),
    "smollm2-1.7b": _sized(_SMOLLM2, 2048, 8192, 24, 32, 32, rope_theta=130000),
    "mistral-7b-v0.1": _sized(
        _MISTRAL | _32K, 4096, 14336, 32, 32, 8, vocab_size=32000, sliding_window=4096, rope_theta=1e4
    ),
    "mistral-7b-v0.3": _sized(_MISTRAL | _32K, 4096, 14336, 32, 32, 8),
    "mistral-nemo-12b": _sized(
        _MISTRAL, 5120, 14336, 40, 32, 8, vocab_size=131072, head_dim=128, max_position_embeddings=131072
    ),
    "mistral-small-24b": _sized(
        _MISTRAL | _32K, 5120, 32768, 40, 32, 8, vocab_size=131072, head_dim=128, rope_theta=1e8
    ),
    "ministral-8b": _sized(_MINISTRAL, 4096, 12288, 36, 32, 8),
    "qwen2.5-0.5b": _sized(_QWEN2S, 896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _sized(_QWEN2S, 1536, 8960, 28, 12, 2),
    "qwen2.5-3b": _sized(_QWEN2S, 2048, 11008, 36, 16, 2),
    "qwen2.5-7b": _sized(_QWEN2L, 3584, 18944, 28, 28, 4),
    "qwen2.5-14b": _sized(_QWEN2L, 5120, 13824, 48, 40, 8),
    "qwen2.5-32b": _sized(_QWEN2L, 5120, 27648, 64, 40, 8),
    "qwen2.5-72b": _sized(_QWEN2L, 8192, 29568, 80, 64, 8),
    "qwen3-0.6b": _sized(_QWEN3, 1024, 3072, 28, 16, 8, **_TIED),
    "qwen3-1.7b": _sized(_QWEN3, 2048, 6144, 28, 16, 8, **_TIED),
    "qwen3-4b": _sized(_QWEN3, 2560, 9728, 36, 32, 8, **_TIED),
    "qwen3-8b": _sized(_QWEN3, 4096, 12288, 36, 32, 8),
    "qwen3-14b": _sized(_QWEN3, 5120, 17408, 40, 40, 8),
    "qwen3-32b": _sized(_QWEN3, 5120, 25600, 64, 64, 8),
    "smollm3-3b": _sized(_SMOLLM3, 2048, 11008, 36, 16, 4),
    "gemma-2b": _sized(_GEMMA, 2048, 16384, 18, 8, 1),
    "gemma-7b": _sized(_GEMMA, 3072, 24576, 28, 16, 16),
    "gemma-2-2b": _sized(_GEMMA2, 2304, 9216, 26, 8, 4, query_pre_attn_scalar=256),
    "gemma-2-9b": _sized(_GEMMA2, 3584, 14336, 42, 16, 8, query_pre_attn_scalar=256),
    "gemma-2-27b": _sized(_GEMMA2, 4608, 36864, 46, 32, 16, query_pre_attn_scalar=144, head_dim=128),
    "gemma-3-270m": _sized(_GEMMA3, 640, 2048, 18, 4, 1),
    "gemma-3-1b": _sized(_GEMMA3, 1152, 6912, 26, 4, 1),
    "gemma-3-4b-text": _sized(_GEMMA3_TEXT, 2560, 10240, 34, 8, 4),
    "gemma-3-12b-text": _sized(_GEMMA3_TEXT, 3840, 15360, 48, 16, 8),
    "gemma-3-27b-text": _sized(_GEMMA3_TEXT, 5376, 21504, 62, 32, 16, head_dim=128, query_pre_attn_scalar=168),
    "embeddinggemma-300m": _sized(
        _GEMMA3 | {"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True},
        *(768, 1152, 24, 3, 1),
        max_position_embeddings=2048,
    ),
    "gemma-4-e2b-text": _sized(
        _GEMMA4_E, 1536, 6144, 35, 8, 1, num_kv_shared_layers=20, use_double_wide_mlp=True, layer_types=_EVERY_FIFTH
    ),
    "gemma-4-e4b-text": _sized(_GEMMA4_E, 2560, 10240, 42, 8, 2, num_kv_shared_layers=18),
    "gemma-4-31b-text": _sized(_GEMMA4, 5376, 21504, 60, 32, 16, num_global_key_value_heads=4),
    "gemma-4-26b-a4b-text": _sized(_GEMMA4 | _EXPERTS_26B, 2816, 2112, 30, 16, 8, num_global_key_value_heads=2),
    "olmo-2-1b": _sized(_OLMO2, 2048, 8192, 16, 16, 16),
    "olmo-2-7b": _sized(_OLMO2, 4096, 11008, 32, 32, 32),
    "olmo-2-13b": _sized(_OLMO2, 5120, 13824, 40, 40, 40),
    "olmo-2-32b": _sized(_OLMO2, 5120, 27648, 64, 40, 8),
    "olmo-3-7b": _sized(_OLMO3, 4096, 11008, 32, 32, 32),
    "olmo-3-32b": _sized(_OLMO3, 5120, 27648, 64, 40, 8),
    "granite-3.1-2b": _sized(
        _GRANITE, 2048, 8192, 40, 32, 8, rope_theta=5e6, attention_multiplier=0.015625, logits_scaling=8.0
    ),
    "granite-3.1-8b": _sized(_GRANITE, 4096, 12800, 40, 32, 8, attention_multiplier=0.0078125, logits_scaling=16.0),
    "command-r-v01": _sized(_COHERE, 8192, 22528, 40, 64, 64, rope_theta=8e6),
    "command-r-08-2024": _sized(_COHERE, 8192, 24576, 40, 64, 8, rope_theta=4e6, max_position_embeddings=131072),
    "command-r-plus": _sized(
        _COHERE, 12288, 33792, 64, 96, 8, rope_theta=75e6, use_qk_norm=True, logit_scale=0.8333333333333334
    ),
    "aya-23-8b": _sized(_AYA, 4096, 14336, 32, 32, 8),
    "aya-expanse-8b": _sized(_AYA, 4096, 14336, 32, 32, 8, logit_scale=0.125),
    "command-r7b": _sized(_COHERE2, 4096, 14336, 32, 32, 8, max_position_embeddings=132096),
    "command-a-111b": _sized(_COHERE2, 12288, 36864, 64, 96, 8),
    "falcon3-1b": _sized(_FALCON3, 2048, 8192, 18, 8, 4, max_position_embeddings=4096),
    "falcon3-3b": _sized(_FALCON3, 3072, 9216, 22, 12, 4),
    "falcon3-7b": _sized(_FALCON3, 3072, 23040, 28, 12, 4),
    "falcon3-10b": _sized(_FALCON3, 3072, 23040, 40, 12, 4),
    "openai-gpt": {"model_type": "openai-gpt", "vocab_size": 40478, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2": _GPT2 | {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "gpt2-medium": _GPT2 | {"n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": _GPT2 | {"n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": _GPT2 | {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "starcoder2-3b": _sized(_STARCODER2, 3072, 12288, 30, 24, 2, rope_theta=999999.4420358813, **_TIED),
    "starcoder2-7b": _sized(_STARCODER2, 4608, 18432, 32, 36, 4, rope_theta=1e6, **_TIED),
    "starcoder2-15b": _sized(_STARCODER2, 6144, 24576, 40, 48, 4, rope_theta=1e5, tie_word_embeddings=False),
    "stablelm-3b-4e1t": _sized(_STABLELM, 2560, 6912, 32, 32, 32, vocab_size=50304),
    "mixtral-8x7b": _sized(_MIXTRAL, 4096, 14336, 32, 32, 8, vocab_size=32000, max_position_embeddings=32768),
    "mixtral-8x22b": _sized(_MIXTRAL, 6144, 16384, 56, 48, 8, vocab_size=32000, max_position_embeddings=65536),
    "qwen1.5-moe-a2.7b": _QWEN2M
    | _sized({}, 2048, 5632, 24, 16, 16, max_position_embeddings=8192)
    | _experts(60, 4, 1408, shared=5632),
    "qwen2-57b-a14b": _sized(_QWEN2M, 3584, 18944, 28, 28, 4) | _experts(64, 8, 2560, shared=20480),
    "qwen3-30b-a3b": _sized(_QWEN3M, 2048, 6144, 48, 32, 4, moe_intermediate_size=768),
    "qwen3-235b-a22b": _sized(_QWEN3M, 4096, 12288, 94, 64, 4, moe_intermediate_size=1536),
    "olmoe-1b-7b": _sized(_OLMOE, 2048, 1024, 16, 16, 16, rms_norm_eps=1e-5),
    "stablelm-2-1.6b": _sized(_STABLELM, 2048, 5632, 24, 32, 32, use_qkv_bias=True),
    "stablelm-2-12b": _sized(_STABLELM, 5120, 13824, 40, 32, 8, qk_layernorm=True, use_parallel_residual=True),
    "glm-4-9b": _sized(_GLM4, 4096, 13696, 40, 32, 2, attention_bias=True),
    "glm-4-32b": _sized(_GLM4, 6144, 23040, 61, 48, 2, attention_bias=False),
    "ministral-3-3b": _sized(_MINISTRAL3, 3072, 9216, 26, 32, 8, **_TIED),
    "ministral-3-8b": _sized(_MINISTRAL3, 4096, 14336, 34, 32, 8),
    "ministral-3-14b": _sized(
        _MINISTRAL3, 5120, 16384, 40, 32, 8, rope_parameters=_MINISTRAL3_ROPE | {"rope_theta": 1e9}
    ),
    "mistral-small-4": {"model_type": "mistral4", "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 12288}
    | {"num_hidden_layers": 36, "num_attention_heads": 32, "kv_lora_rank": 256, "v_head_dim": 128}
    | {"moe_intermediate_size": 2048, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 4}
    | {"rope_parameters": _MISTRAL4_ROPE},
    "gpt-oss-20b": _sized(_GPT_OSS, 2880, 2880, 24, 64, 8, num_local_experts=32),
    "gpt-oss-120b": _sized(_GPT_OSS, 2880, 2880, 36, 64, 8, num_local_experts=128),
    "llama-4-scout": {"model_type": "llama4", "text_config": _SCOUT},
    "llama-4-scout-text": _SCOUT,
    "llama-4-maverick": {"model_type": "llama4", "text_config": _MAVERICK},
    "llama-4-maverick-text": _MAVERICK,
    "deepseek-v2-lite": _sized(_DEEPSEEK2, 2048, 10944, 27, 16, 16, q_lora_rank=None, topk_method="greedy")
    | {"routed_scaling_factor": 1.0, "moe_intermediate_size": 1408, "n_routed_experts": 64},
    "deepseek-v2": _sized(_DEEPSEEK2, 5120, 12288, 60, 128, 128, topk_method="group_limited_greedy")
    | {"routed_scaling_factor": 16.0, "moe_intermediate_size": 1536, "n_routed_experts": 160}
    | {"n_group": 8, "topk_group": 3},
    "deepseek-v3": _sized(_DEEPSEEK3, 7168, 18432, 61, 128, 128),
    "deepseek-v3.2": _sized(_DEEPSEEK32, 7168, 18432, 61, 128, 128, index_n_heads=64),
    "deepseek-r1": _sized(_DEEPSEEK3, 7168, 18432, 61, 128, 128),
    "kimi-k2": _sized(_MOONSHOT | _KIMI, 7168, 18432, 61, 64, 64),
    "moonlight-16b-a3b": _sized(_MOONSHOT | _MOONLIGHT, 2048, 11264, 27, 16, 16),
    "glm-4.5": _sized(_GLM45, 5120, 12288, 92, 96, 8, moe_intermediate_size=1536, n_routed_experts=160)
    | {"first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "use_qk_norm": True},
    "glm-4.5-air": _sized(_GLM45, 4096, 10944, 46, 96, 8, moe_intermediate_size=1408, n_routed_experts=128)
    | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "use_qk_norm": False},
    "glm-5": _sized(_GLM5, 6144, 12288, 78, 64, 64),
    "glm-5.2": _sized(_GLM5 | _GLM52, 6144, 12288, 78, 64, 64),
}

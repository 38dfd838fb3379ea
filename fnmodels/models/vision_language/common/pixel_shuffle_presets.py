"""Published sizes of the models that `fnmodels.models.vision_language.pixel_shuffle` reads, as config.json files."""

from typing import Any

from fnmodels.models.common.config_json import ConfigJson

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _sized(base: ConfigJson, *sizes: int, **rest: Any) -> ConfigJson:
    return base | dict(zip(_SIZES, sizes, strict=False)) | rest


# config.json of HuggingFaceM4/Idefics3-8B-Llama3 (arXiv 2408.12637), HuggingFaceTB/SmolVLM-*-Instruct and
# SmolVLM2-*-Instruct (arXiv 2504.05299).
_LLAMA = {"model_type": "llama", "rms_norm_eps": 1e-5}
_SMOL: ConfigJson = _LLAMA | {"vocab_size": 49280, "rope_theta": 100000.0, "max_position_embeddings": 8192}
_LLAMA3: ConfigJson = _LLAMA | {"vocab_size": 128259, "rope_theta": 500000.0, "max_position_embeddings": 131072}
_LLAMA3 |= {
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
}
_SO400M = _sized({"image_size": 384, "patch_size": 14}, 1152, 4304, 27, 16)
_SMALL_TOWER = _sized({"image_size": 512, "patch_size": 16}, 768, 3072, 12, 12)
_256M: ConfigJson = {"scale_factor": 4, "image_token_id": 49190, "vision_config": _SMALL_TOWER}
_500M = _256M | {"text_config": _sized(_SMOL, 960, 2560, 32, 15, 5)}
_256M |= {"text_config": _sized(_SMOL, 576, 1536, 30, 9, 3)}
_2_2B: ConfigJson = {"scale_factor": 3, "vision_config": _SO400M}
_LONG = {"vocab_size": 49155, "rope_theta": 273768.0, "max_position_embeddings": 16384}
_IDEFICS: dict[str, ConfigJson] = {
    "idefics3-8b": {"scale_factor": 2, "image_token_id": 128257, "vision_config": _SO400M | {"image_size": 364}}
    | {"text_config": _sized(_LLAMA3, 4096, 14336, 32, 32, 8)},
    "smolvlm-256m": _256M,
    "smolvlm-500m": _500M,
    "smolvlm-2.2b": _2_2B | {"image_token_id": 49153, "text_config": _sized(_SMOL, 2048, 8192, 24, 32, 32, **_LONG)},
}
_SMOLVLM2: dict[str, ConfigJson] = {
    "smolvlm2-256m": _256M,
    "smolvlm2-500m": _500M,
    "smolvlm2-2.2b": _2_2B
    | {"image_token_id": 49190, "text_config": _sized(_SMOL, 2048, 8192, 24, 32, 32, rope_theta=130000.0)},
}

# config.json of OpenGVLab/InternVL3-1B-hf, -2B-hf and -8B-hf (arXiv 2504.10479).
_INTERNVIT = _sized({"model_type": "internvl_vision", "attention_bias": True}, 1024, 4096, 24, 16)
_INTERNVIT |= {"image_size": [448, 448], "patch_size": [14, 14]}
_QWEN2 = {"model_type": "qwen2", "vocab_size": 151674, "rms_norm_eps": 1e-6, "rope_theta": 1e6}
_QWEN2 |= {"max_position_embeddings": 32768, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}


def _internvl(*sizes: int) -> ConfigJson:
    own = {"model_type": "internvl", "tie_word_embeddings": False, "vision_config": _INTERNVIT}
    return own | {"text_config": _sized(_QWEN2, *sizes)}


# config.json of LiquidAI/LFM2-VL-450M and -1.6B (arXiv 2511.23404).
_LFM2: ConfigJson = {"model_type": "lfm2", "vocab_size": 65536, "full_attn_idxs": [2, 5, 8, 10, 12, 14]}
_NAFLEX = {"model_type": "siglip2_vision_model", "num_patches": 256, "patch_size": 16, "vision_use_head": False}


def _lfm2_vl(text: tuple[int, ...], tower: tuple[int, ...]) -> ConfigJson:
    parts = {"text_config": _sized(_LFM2, *text), "vision_config": _sized(_NAFLEX, *tower)}
    return {"model_type": "lfm2_vl"} | parts


PRESETS: dict[str, ConfigJson] = {
    **{name: values | {"model_type": "idefics3"} for name, values in _IDEFICS.items()},
    **{name: values | {"model_type": "smolvlm"} for name, values in _SMOLVLM2.items()},
    "internvl3-1b": _internvl(896, 4864, 24, 14, 2),
    "internvl3-2b": _internvl(1536, 8960, 28, 12, 2),
    "internvl3-8b": _internvl(3584, 18944, 28, 28, 4),
    "lfm2-vl-450m": _lfm2_vl((1024, 6656, 16, 16, 8), (768, 3072, 12, 12)),
    "lfm2-vl-1.6b": _lfm2_vl((2048, 12288, 16, 32, 8), (1152, 4304, 26, 16)),
}

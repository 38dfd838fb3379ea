"""Tiny configurations of vision towers, one per way in which their maths can differ, and published totals."""

from typing import Any

# 24 / 6: a table of 4 x 4 positions
_TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 6,
    "num_channels": 3,
    "layer_norm_eps": 1e-2,
}
_LABELS = {"id2label": {"0": "cat", "1": "dog", "2": "eel"}, "label2id": {"cat": 0, "dog": 1, "eel": 2}}


def variants() -> dict[str, dict[str, Any]]:
    """{name: config.json}."""
    siglip, siglip2 = dict(_TINY), _naflex()
    clip = _TINY | {"model_type": "clip_vision_model"}
    dinov3 = _TINY | {"model_type": "dinov3_vit", "architectures": ["DINOv3ViTModel"], "layerscale_value": 0.5}
    pixtral = _TINY | {"model_type": "pixtral", "architectures": ["PixtralVisionModel"]}
    del pixtral["layer_norm_eps"]
    vit, dinov2 = _TINY | {"model_type": "vit"}, _TINY | {"model_type": "dinov2"}
    del dinov2["intermediate_size"]
    registers = dinov2 | {"model_type": "dinov2_with_registers", "num_register_tokens": 3, "mlp_ratio": 2}
    return {
        "vit": vit | {"architectures": ["ViTModel"]},
        "vit_labels": vit | {"architectures": ["ViTForImageClassification"], "qkv_bias": False} | _LABELS,
        "dinov2": dinov2 | {"architectures": ["Dinov2Model"], "mlp_ratio": 2},
        "dinov2_labels": dinov2 | {"architectures": ["Dinov2ForImageClassification"], "use_swiglu_ffn": True} | _LABELS,
        "dinov2_registers": registers | {"architectures": ["Dinov2WithRegistersModel"]},
        "dinov2_registers_labels": registers
        | {"architectures": ["Dinov2WithRegistersForImageClassification"]}
        | _LABELS,
        "clip_vision": clip | {"architectures": ["CLIPVisionModel"]},
        "dinov3": dinov3 | {"num_register_tokens": 2},
        "dinov3_gated": dinov3
        | {"num_register_tokens": 1, "use_gated_mlp": True, "hidden_act": "silu", "key_bias": True},
        "siglip_vision": siglip | {"model_type": "siglip_vision_model", "architectures": ["SiglipVisionModel"]},
        "siglip2_vision": siglip2 | {"model_type": "siglip2_vision_model", "architectures": ["Siglip2VisionModel"]},
        "pixtral": pixtral,
        "pixtral_silu": pixtral
        | {"hidden_act": "silu", "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}},
        "clip_projection": clip | {"architectures": ["CLIPVisionModelWithProjection"], "projection_dim": 20},
    }


def _naflex() -> dict[str, Any]:
    values = _TINY | {"num_patches": 16}
    del values["image_size"]
    return values


def pairs() -> dict[str, dict[str, Any]]:
    """{name: config.json} of models with a text and a vision tower."""
    text = {name: size for name, size in _TINY.items() if not name.startswith(("image", "patch", "num_c"))}
    text |= {"vocab_size": 61, "max_position_embeddings": 16, "hidden_size": 24, "bos_token_id": 1}
    siglip = text | {"projection_size": 32, "eos_token_id": 2}
    clip = {"model_type": "clip", "vision_config": _TINY, "projection_dim": 20}
    return {
        "clip": clip | {"text_config": text | {"eos_token_id": 5}},
        "clip_old": clip | {"text_config": text | {"eos_token_id": 2, "hidden_act": "gelu"}},
        "siglip": {"model_type": "siglip", "vision_config": _TINY, "text_config": siglip},
        "siglip2": {"model_type": "siglip2", "vision_config": _naflex(), "text_config": siglip},
    }


# Published parameter counts of the presets.
TOTALS: dict[str, int | str] = {
    "vit-base-patch16-224": 86_389_248,
    "dinov2-base": 86_580_480,
    "dinov3-vits16": 21_596_544,
    "dinov3-vitb16": 85_660_416,
    "siglip-base-patch16-224": 203_155_970,
    "clip-vit-base-patch32": 151_277_313,
    "llava-1.5-7b": 7_063_427_072,
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    # of which transformers and this package read neither SigLIP's head nor a table of positions of packed images
    "paddleocr-vl-0.9b": 958_588_736 - 15_238_352 - 32768 * 1152,
    "paligemma-3b": 2_923_466_480,
    "paligemma2-3b": 3_032_242_416,
    # the sums of the published totals of Gemma 2, with 1216 more tokens, of SigLIP without its head, and the projector
    "paligemma2-10b": 9_241_705_984 + 1216 * 3584 + 412_442_352 + 3584 * 1153,
    "paligemma2-28b": 27_227_128_320 + 1216 * 4608 + 412_442_352 + 4608 * 1153,
    "mistral-small-3.1-24b": 24_011_361_280,
    "qwen2-vl-2b": 2_208_985_600,
    "qwen2-vl-7b": 8_291_375_616,
    "qwen2-vl-72b": 73_405_560_320,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen2.5-vl-32b": 33_452_718_336,
    "qwen2.5-vl-72b": 73_410_777_344,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "qwen3-vl-235b-a22b": 235_670_022_896,
    "dinov2-with-registers-base": 86_583_552,
    "siglip2-base-patch16-224": 375_187_970,
    "siglip2-base-patch16-naflex": 375_234_050,
}

"""Wrappers with joined cells equal transformers with every parameter perturbed; packed documents equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from fnmodels import tree
from fnmodels.models.vision_language import pixel_shuffle
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

IMAGE = 60  # the id of image tokens
# 24 / 4: a table of 6 x 6 positions, cells of 2 x 2
_SIGLIP: dict[str, Any] = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 40}
_SIGLIP |= {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 24, "patch_size": 4, "layer_norm_eps": 1e-2}
_NAFLEX = {name: value for name, value in _SIGLIP.items() if name != "image_size"}
_NAFLEX |= {"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False}
_INTERN = _SIGLIP | {"model_type": "internvl_vision", "image_size": [24, 24], "patch_size": [4, 4]}
_SIZES: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": 61}
_SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
_SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT = _SIZES | {"model_type": "llama", "rms_norm_eps": 7e-3}
_COHERE = _SIZES | {"model_type": "cohere2", "layer_norm_eps": 7e-3, "sliding_window": 5, "logit_scale": 0.5}
_COHERE |= {"layer_types": ["sliding_attention", "full_attention"]}
_LFM2 = _SIZES | {"model_type": "lfm2", "norm_eps": 7e-3, "layer_types": ["conv", "full_attention"]}
_LFM2 |= {"block_auto_adjust_ff_dim": False}
_QWEN3 = _TEXT | {"model_type": "qwen3", "head_dim": 6}


def _values(model_type: str, text: dict[str, Any], vision: dict[str, Any], **own: Any) -> dict[str, Any]:
    token = "image_token_index" if model_type == "aya_vision" else "image_token_id"
    return {"model_type": model_type, token: IMAGE, "text_config": text, "vision_config": vision} | own


VARIANTS: dict[str, dict[str, Any]] = {
    "deepseek_vl": _values("deepseek_vl", _TEXT, _SIGLIP | {"image_size": 12}, tie_word_embeddings=False),
    "aya_vision": _values("aya_vision", _COHERE, _SIGLIP | {"vision_use_head": False}, adapter_layer_norm_eps=2e-2),
    "cohere2_vision": _values("cohere2_vision", _COHERE, _SIGLIP, alignment_intermediate_size=44),
    "lfm2_vl": _values("lfm2_vl", _LFM2, _NAFLEX, projector_hidden_size=44),
    "lfm2_vl_plain": _values(
        "lfm2_vl", _LFM2, _NAFLEX, projector_hidden_size=44, projector_use_layernorm=False, projector_bias=False
    ),
    "internvl": _values("internvl", _TEXT | {"model_type": "qwen2"}, _INTERN | {"attention_bias": True}),
    "internvl_rms": _values(
        "internvl", _QWEN3, _INTERN | {"use_qk_norm": True, "norm_type": "rms_norm"}, tie_word_embeddings=False
    ),
    "qianfan_ocr": _values(
        "qianfan_ocr", _QWEN3 | {"tie_word_embeddings": False}, _INTERN | {"model_type": "qianfan_ocr_vision"}
    ),
    "idefics3": _values("idefics3", _TEXT, _SIGLIP | {"model_type": "idefics3_vision"}),
    "smolvlm": _values("smolvlm", _TEXT, _SIGLIP | {"model_type": "smolvlm_vision"}, tie_word_embeddings=True),
}
STRUCTURES = ("internvl", "lfm2_vl")  # for the tests of all readers of images, to which the others are like these
every_variant = pytest.mark.parametrize("name", VARIANTS)


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    config._attn_implementation = "eager"
    return wrappers.perturbed(AutoModelForImageTextToText.from_config(config))


@functools.cache
def _config(name: str) -> pixel_shuffle.Config:
    return pixel_shuffle.Config.from_hf(VARIANTS[name])


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


def _documents(name: str) -> tuple[list[Any], ...]:
    """Per document, numbers of text tokens, and between them the (rows, columns) of images in cells."""
    if name.startswith("lfm2"):
        return [2, (2, 3), 3], [5, (1, 4), 1, (3, 2), 4], [3], [(2, 2), 2]
    square = (_config(name).vision.side // _config(name).merge,) * 2
    return [2, square, 3], [5, square, 1, square, 4], [3], [square, 2]


def _ours(name: str, params: Any, **bug: Any) -> tuple[Tensor, Tensor]:
    return wrappers.cell_logits(pixel_shuffle, _config(name), _documents(name), IMAGE, params, **bug)


def _theirs(name: str) -> Tensor:
    config = _config(name)
    side = config.vision.patch_size * config.merge
    pixels = wrappers.pixels_for(config)
    # transformers leaves out Cohere's scale of logits in these wrappers, though not in the text alone
    scale = getattr(config.text, "logit_scale", 1.0)
    return wrappers.alone(_reference(name), _documents(name), IMAGE, side, pixels=pixels) * scale


@every_variant
def test_packed_documents_with_images_equal_transformers_alone(name: str) -> None:
    with torch.no_grad():
        wanted = _theirs(name)
        logits, segment_ids = _ours(name, _params(name))
        assert_close(logits[segment_ids > 0], wanted)
        wrong = _ours(name, _params(name), reverse=True)[0]
        assert (wrong[segment_ids > 0] - wanted).abs().max() > 1e-2


@every_variant
def test_gradients_equal_transformers(name: str) -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params(name))
    logits, segment_ids = _ours(name, params)
    logits[segment_ids > 0].square().sum().backward()
    model = _reference(name)
    model.zero_grad()
    _theirs(name).square().sum().backward()
    wrappers.assert_gradients(model, _config(name), params)


@every_variant
def test_files_are_read_and_written(name: str, tmp_path: Path) -> None:
    wrappers.assert_files(_reference(name), _config(name), tmp_path)

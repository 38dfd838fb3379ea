"""PaddleOCR-VL equals transformers with every parameter perturbed; packed documents equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from fnmodels import tree
from fnmodels.inputs.images import patches_of
from fnmodels.models.vision_language import paddleocr_vl
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

IMAGE = 60  # the id of image tokens
# 20 / 4: a table of 5 x 5 positions, which no image has
_VISION: dict[str, Any] = {"model_type": "paddleocr_vl_vision", "hidden_size": 32, "intermediate_size": 40}
_VISION |= {"num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4, "image_size": 20, "layer_norm_eps": 1e-2}
_TEXT: dict[str, Any] = {"model_type": "paddleocr_vl_text", "hidden_size": 24, "intermediate_size": 40}
_TEXT |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 61}
_TEXT |= {"max_position_embeddings": 64, "rms_norm_eps": 7e-3, "tie_word_embeddings": False}
_TEXT["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]}
VALUES = {"model_type": "paddleocr_vl", "image_token_id": IMAGE, "video_token_id": 59, "vision_start_token_id": 58}
VALUES |= {"vision_end_token_id": 57, "vision_config": _VISION, "tie_word_embeddings": False, "text_config": _TEXT}
VARIANTS: dict[str, dict[str, Any]] = {
    "paddleocr_vl": VALUES,
    "paddleocr_vl_bias": VALUES
    | {"tie_word_embeddings": True, "text_config": _TEXT | {"use_bias": True, "tie_word_embeddings": True}},
}
STRUCTURES = ("paddleocr_vl",)
DOCUMENTS: tuple[list[Any], ...] = ([2, (2, 3), 3], [5, (1, 4), 1, (3, 2), 4], [3], [(2, 2), 2])
every_variant = pytest.mark.parametrize("name", VARIANTS)


@functools.cache
def _config(name: str) -> paddleocr_vl.Config:
    return paddleocr_vl.Config.from_hf(VARIANTS[name])


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    config._attn_implementation = "eager"
    return wrappers.perturbed(AutoModelForImageTextToText.from_config(config))


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


def pixels(tokens: Tensor, images: list[Tensor]) -> dict[str, Tensor]:
    """What transformers takes beside the ids [1, S]: patches [n, 3, p, p] row by row, and grids."""
    cells = [patches_of(image, 4) for image in images]
    found = {"image_grid_thw": torch.tensor([(1, *one.shape[:2]) for one in cells])}
    found["mm_token_type_ids"] = (tokens == IMAGE).long()
    return found | {"pixel_values": torch.cat([one.reshape(-1, 3, 4, 4) for one in cells])}


def _ours(name: str, params: Any, **bug: bool) -> tuple[Tensor, Tensor]:
    return wrappers.qwen_logits(paddleocr_vl, _config(name), DOCUMENTS, IMAGE, params, **bug)


def _theirs(name: str) -> Tensor:
    out = []
    for text, images in zip(*wrappers.documents_with_grids(DOCUMENTS, IMAGE, 8), strict=True):
        known = pixels(text[None], images) if images else {}
        out.append(_reference(name)(input_ids=text[None], use_cache=False, **known).logits[0])
    return torch.cat(out)


@every_variant
def test_packed_documents_with_images_equal_transformers_alone(name: str) -> None:
    with torch.no_grad():
        wanted = _theirs(name)
        logits, segment_ids = _ours(name, _params(name))
        assert_close(logits[segment_ids > 0], wanted)
        assert (_ours(name, _params(name), text_order=True)[0][segment_ids > 0] - wanted).abs().max() > 1e-2


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


def test_published_files_are_read() -> None:
    """They have one level, and the tower's object has the whole model's type."""
    text = {
        name: value
        for name, value in _TEXT.items()
        if name not in ("model_type", "rope_parameters", "tie_word_embeddings")
    }
    text |= {"rope_theta": 1e4, "rope_scaling": {"mrope_section": [1, 2, 1], "rope_type": "default", "type": "default"}}
    text |= {"compression_ratio": 1.0, "ignored_index": -100, "max_sequence_length": None, "use_flash_attention": False}
    text |= {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0, "sliding_window": None}
    tower = _VISION | {"model_type": "paddleocr_vl", "tokens_per_second": 2, "temporal_patch_size": 2}
    outer = {name: value for name, value in VALUES.items() if name != "text_config"}
    found = paddleocr_vl.Config.from_hf(outer | text | {"vision_config": tower, "use_bias": False})
    assert found == _config("paddleocr_vl")
    with pytest.raises(ValueError, match=r"'compression_ratio' is 2\.0; only 1\.0"):
        paddleocr_vl.Config.from_hf(outer | text | {"vision_config": tower, "compression_ratio": 2.0})

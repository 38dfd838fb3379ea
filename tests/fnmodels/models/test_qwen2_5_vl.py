"""Qwen2.5-VL equals transformers with every parameter perturbed; packed documents with images equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

import fnmodels
from fnmodels import tree
from fnmodels.models.vision_language import qwen2_5_vl
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

IMAGE = 60  # the id of image tokens
# Windows of 2 x 2 cells, which leave pieces at the borders of images.
_VISION: dict[str, Any] = {"model_type": "qwen2_5_vl_vision", "depth": 3, "hidden_size": 32, "intermediate_size": 40}
_VISION |= {"num_heads": 4, "patch_size": 4, "out_hidden_size": 24, "window_size": 16, "fullatt_block_indexes": [1]}
_TEXT: dict[str, Any] = {"model_type": "qwen2_5_vl_text", "hidden_size": 24, "intermediate_size": 40, "vocab_size": 61}
_TEXT |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "rms_norm_eps": 7e-3}
_TEXT |= {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
_TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 3]}}
VALUES = {"model_type": "qwen2_5_vl", "image_token_id": IMAGE, "video_token_id": 59, "vision_start_token_id": 58}
VALUES |= {"vision_end_token_id": 57, "tie_word_embeddings": False, "vision_config": _VISION, "text_config": _TEXT}
_SECOND = {"model_type": "qwen2_vl_vision", "depth": 2, "embed_dim": 32, "hidden_size": 24, "mlp_ratio": 2}
_SECOND |= {"num_heads": 4, "patch_size": 4}
VARIANTS = {
    "qwen2_5_vl": VALUES,
    "qwen2_vl": VALUES
    | {"model_type": "qwen2_vl", "vision_config": _SECOND, "text_config": _TEXT | {"model_type": "qwen2_vl_text"}},
}
FIRST = qwen2_5_vl.Config.from_hf(VALUES)
STRUCTURES = ("qwen2_5_vl",)  # for the tests of all readers of images
every_variant = pytest.mark.parametrize("name", VARIANTS)
# Per document: numbers of text tokens, and between them the (rows, columns) of images in cells of 2 x 2 patches.
DOCUMENTS: tuple[list[Any], ...] = ([2, (2, 3), 3], [5, (1, 4), 1, (3, 2), 4], [3], [(2, 2), 2])


@functools.cache
def _config(name: str) -> qwen2_5_vl.Config:
    return qwen2_5_vl.Config.from_hf(VARIANTS[name])


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    config._attn_implementation = "eager"
    return wrappers.perturbed(AutoModelForImageTextToText.from_config(config))


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


def _ours(name: str, params: Any, **bug: bool) -> tuple[Tensor, Tensor]:
    return wrappers.qwen_logits(qwen2_5_vl, _config(name), DOCUMENTS, IMAGE, params, **bug)


@every_variant
def test_packed_documents_with_images_equal_transformers_alone(name: str) -> None:
    with torch.no_grad():
        wanted = wrappers.each_alone(_reference(name), DOCUMENTS, IMAGE, 8)
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
    wrappers.each_alone(model, DOCUMENTS, IMAGE, 8).square().sum().backward()
    wrappers.assert_gradients(model, _config(name), params)


@every_variant
def test_files_are_read_and_written(name: str, tmp_path: Path) -> None:
    wrappers.assert_files(_reference(name), _config(name), tmp_path)


def test_published_files_are_read() -> None:
    """They have the text's fields beside the tower's object, an older rope object and older names."""
    text = {name: value for name, value in _TEXT.items() if name not in ("rope_parameters", "model_type")}
    text |= {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 3]}, "vision_token_id": 56}
    tower = _VISION | {"in_chans": 3, "spatial_patch_size": 4}
    values = {name: value for name, value in VALUES.items() if name != "text_config"} | text
    assert qwen2_5_vl.Config.from_hf(values | {"vision_config": tower | {"model_type": "qwen2_5_vl"}}) == FIRST


def test_windows_are_counted_from_the_corner_of_each_image() -> None:
    images = [torch.randn(6, 16, 24), torch.randn(6, 8, 16)]
    patches, at, image_ids = fnmodels.inputs.patch_rows(images, FIRST.vision, length=40)
    found = fnmodels.prepare(FIRST.vision, patches, positions=at, segment_ids=image_ids)[1]["window"].dense()[0, 0]
    seen = sorted(found.sum(-1).tolist())
    assert seen == [0] * 8 + [8] * 16 + [16] * 16  # 4 x 4 and 4 x 2 patches; 2 x 4


def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="out_hidden_size 32 of vision_config is not the hidden_size 24"):
        qwen2_5_vl.Config.from_hf(VALUES | {"vision_config": _VISION | {"out_hidden_size": 32}})
    with pytest.raises(ValueError, match="A window of 0 patches a side is no multiple of a cell of 2"):
        qwen2_5_vl.Config.from_hf(VALUES | {"vision_config": _VISION | {"window_size": 7}})
    with pytest.raises(ValueError, match=r"'fullatt_block_indexes' is \[-1\], but must be a list of layers"):
        qwen2_5_vl.Config.from_hf(VALUES | {"vision_config": _VISION | {"fullatt_block_indexes": [-1]}})
    rope = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 2]}}
    with pytest.raises(ValueError, match=r"'mrope_section' is \[1, 2\], but must be three integers"):
        qwen2_5_vl.Config.from_hf(VALUES | {"text_config": _TEXT | rope})

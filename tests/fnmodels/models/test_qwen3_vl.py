"""Qwen3-VL equals transformers with every parameter perturbed; packed documents with images equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from fnmodels import tree
from fnmodels.models.vision_language import qwen3_vl
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

IMAGE = 60  # the id of image tokens
# 25 entries: a table of 5 x 5 positions, which no image has.
_VISION: dict[str, Any] = {"model_type": "qwen3_vl_vision", "depth": 3, "hidden_size": 32, "intermediate_size": 40}
_VISION |= {"num_heads": 4, "patch_size": 4, "out_hidden_size": 24, "num_position_embeddings": 25}
_VISION |= {"deepstack_visual_indexes": [0, 1]}
_TEXT: dict[str, Any] = {"model_type": "qwen3_vl_text", "hidden_size": 24, "intermediate_size": 40, "vocab_size": 61}
_TEXT |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
_TEXT |= {"rms_norm_eps": 7e-3, "max_position_embeddings": 64}
_TEXT |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 2, 1]}}
VALUES = {"model_type": "qwen3_vl", "image_token_id": IMAGE, "video_token_id": 59, "vision_start_token_id": 58}
VALUES |= {"vision_end_token_id": 57, "tie_word_embeddings": False, "vision_config": _VISION, "text_config": _TEXT}
CONFIG = qwen3_vl.Config.from_hf(VALUES)
# Per document: numbers of text tokens, and between them the (rows, columns) of images in cells of 2 x 2 patches.
DOCUMENTS: tuple[list[Any], ...] = ([2, (2, 3), 3], [5, (1, 4), 1, (3, 2), 4], [3], [(2, 2), 2])


@functools.cache
def _reference() -> Any:
    config = Qwen3VLConfig(**VALUES)
    config._attn_implementation = "eager"
    return wrappers.perturbed(Qwen3VLForConditionalGeneration(config))


@functools.cache
def _params() -> Any:
    return wrappers.ours_of(on_disk(_reference()), CONFIG)


_ours = functools.partial(wrappers.qwen_logits, qwen3_vl, CONFIG, DOCUMENTS, IMAGE)


def test_packed_documents_with_images_equal_transformers_alone() -> None:
    with torch.no_grad():
        wanted = wrappers.each_alone(_reference(), DOCUMENTS, IMAGE, 8)
        logits, segment_ids = _ours(_params())
        assert_close(logits[segment_ids > 0], wanted)
        assert (_ours(_params(), text_order=True)[0][segment_ids > 0] - wanted).abs().max() > 1e-2


def test_gradients_equal_transformers() -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params())
    logits, segment_ids = _ours(params)
    logits[segment_ids > 0].square().sum().backward()
    model = _reference()
    model.zero_grad()
    wrappers.each_alone(model, DOCUMENTS, IMAGE, 8).square().sum().backward()
    wrappers.assert_gradients(model, CONFIG, params)


def test_files_are_read_and_written(tmp_path: Path) -> None:
    wrappers.assert_files(_reference(), CONFIG, tmp_path)


def test_published_files_are_read() -> None:
    """They name the tower by the model's type and have an older rope object."""
    text = {name: value for name, value in _TEXT.items() if name != "rope_parameters"}
    text |= {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "mrope_interleaved": True}}
    text["rope_scaling"] = text["rope_scaling"] | {"mrope_section": [3, 2, 1]}
    assert (
        qwen3_vl.Config.from_hf(VALUES | {"vision_config": _VISION | {"model_type": "qwen3_vl"}, "text_config": text})
        == CONFIG
    )


def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="out_hidden_size 32 of vision_config is not the hidden_size 24"):
        qwen3_vl.Config.from_hf(VALUES | {"vision_config": _VISION | {"out_hidden_size": 32}})
    with pytest.raises(ValueError, match=r"deepstack_visual_indexes \[3\] must be different layers of the tower's 3"):
        qwen3_vl.Config.from_hf(VALUES | {"vision_config": _VISION | {"deepstack_visual_indexes": [3]}})
    with pytest.raises(ValueError, match="'num_position_embeddings' is 26, but must be a square"):
        qwen3_vl.Config.from_hf(VALUES | {"vision_config": _VISION | {"num_position_embeddings": 26}})
    with pytest.raises(ValueError, match="'use_sliding_window' is true; only false"):
        qwen3_vl.Config.from_hf(VALUES | {"text_config": _TEXT | {"use_sliding_window": True}})

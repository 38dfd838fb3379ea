"""Qwen3-VL equals transformers with every parameter perturbed; packed documents with images equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from fnmodels import tree
from fnmodels.models.vision_language import qwen3_vl
from tests.support import wrappers
from tests.support.oracle import assert_close

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
_MOE = {"model_type": "qwen3_vl_moe_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_MOE |= {"decoder_sparse_step": 1, "mlp_only_layers": [1]}
VARIANTS = {
    "qwen3_vl": VALUES,
    "qwen3_vl_moe": VALUES
    | {"model_type": "qwen3_vl_moe", "text_config": _TEXT | _MOE}
    | {"vision_config": _VISION | {"model_type": "qwen3_vl_moe_vision"}},
}
FIRST = qwen3_vl.Config.from_hf(VALUES)
every_variant = pytest.mark.parametrize("name", VARIANTS)
# Per document: numbers of text tokens, and between them the (rows, columns) of images in cells of 2 x 2 patches.
DOCUMENTS: tuple[list[Any], ...] = ([2, (2, 3), 3], [5, (1, 4), 1, (3, 2), 4], [3], [(2, 2), 2])


@functools.cache
def _config(name: str) -> qwen3_vl.Config:
    return qwen3_vl.Config.from_hf(VARIANTS[name])


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    config._attn_implementation = "eager"
    config.text_config._experts_implementation = "eager"
    return wrappers.perturbed(AutoModelForImageTextToText.from_config(config))


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(wrappers.as_published(_reference(name)), _config(name))


def _ours(name: str, params: Any, **bug: bool) -> tuple[Tensor, Tensor]:
    return wrappers.qwen_logits(qwen3_vl, _config(name), DOCUMENTS, IMAGE, params, **bug)


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
    """They name the tower by the model's type and have an older rope object."""
    text = {name: value for name, value in _TEXT.items() if name != "rope_parameters"}
    text |= {"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "mrope_interleaved": True}}
    text["rope_scaling"] = text["rope_scaling"] | {"mrope_section": [3, 2, 1]}
    assert (
        qwen3_vl.Config.from_hf(VALUES | {"vision_config": _VISION | {"model_type": "qwen3_vl"}, "text_config": text})
        == FIRST
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

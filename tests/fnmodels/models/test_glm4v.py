"""GLM's wrappers with images equal transformers with every parameter perturbed; packed documents equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from fnmodels import tree
from fnmodels.models.vision_language import glm4v
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

IMAGE = 60  # the id of image tokens
BOUND = 1e-4  # the reference resamples its positions in fp32, by coordinates from -1 to 1
# 20 / 4: a table of 5 x 5 positions, which no image has
_VISION: dict[str, Any] = {"depth": 2, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "out_hidden_size": 24}
_VISION |= {"intermediate_size": 20, "image_size": 20, "rms_norm_eps": 1e-2}
_TEXT: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "vocab_size": 61, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 64, "rms_norm_eps": 7e-3}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 0, 1]}
_TEXT |= {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}, "pad_token_id": 0}
_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_shared_experts": 1}
_MOE |= {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
_OUTER = {"image_token_id": IMAGE, "video_token_id": 59, "image_start_token_id": 58, "image_end_token_id": 57}
_OUTER |= {"video_start_token_id": 56, "video_end_token_id": 55, "tie_word_embeddings": False}


def _values(model_type: str, parts: str, text: dict[str, Any], **vision: Any) -> dict[str, Any]:
    own = {"text_config": text | {"model_type": f"{parts}_text"}}
    own["vision_config"] = _VISION | {"model_type": f"{parts}_vision"} | vision
    return {"model_type": model_type, **_OUTER, **own}


_FULL = {"rope_parameters": _ROPE | {"mrope_section": [1, 2, 1]}, "head_dim": 8}
_FULL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
VARIANTS: dict[str, dict[str, Any]] = {
    "glm4v": _values("glm4v", "glm4v", _TEXT, attention_bias=True),
    "glm46v": _values("glm46v", "glm4v", _TEXT),
    "glm4v_moe": _values("glm4v_moe", "glm4v_moe", _TEXT | _MOE),
    # heads that are wider than the width divided among them, as in GLM-4.5V
    "glm4v_moe_wide": _values("glm4v_moe", "glm4v_moe", _TEXT | _MOE | {"num_attention_heads": 4, "head_dim": 8}),
    "glm_ocr": _values("glm_ocr", "glm_ocr", _TEXT | _FULL),
}
STRUCTURES = ("glm4v", "glm4v_moe")  # for the tests of all readers of images
# Per document: numbers of text tokens, and between them the (rows, columns) of images in cells of 2 x 2 patches.
DOCUMENTS: tuple[list[Any], ...] = ([2, (2, 3), 3], [5, (1, 4), 1, (3, 2), 4], [3], [(2, 2), 2])
every_variant = pytest.mark.parametrize("name", VARIANTS)


@functools.cache
def _config(name: str) -> glm4v.Config:
    return glm4v.Config.from_hf(VARIANTS[name])


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    config._attn_implementation = "eager"
    config.text_config._experts_implementation = "eager"
    model = wrappers.perturbed(AutoModelForImageTextToText.from_config(config))
    return wrappers.with_generic_buffers(model)


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


def _ours(name: str, params: Any, **bug: bool) -> tuple[Tensor, Tensor]:
    return wrappers.qwen_logits(glm4v, _config(name), DOCUMENTS, IMAGE, params, **bug)


@every_variant
def test_packed_documents_with_images_equal_transformers_alone(name: str) -> None:
    with torch.no_grad():
        wanted = wrappers.each_alone(_reference(name), DOCUMENTS, IMAGE, 8)
        logits, segment_ids = _ours(name, _params(name))
        assert_close(logits[segment_ids > 0], wanted, bound=BOUND)
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

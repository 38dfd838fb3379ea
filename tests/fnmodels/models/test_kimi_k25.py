"""Kimi K2.5 with images equals transformers with every parameter perturbed; packed documents equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from fnmodels import tree
from fnmodels.inputs.images import patches_of
from fnmodels.models.vision_language import kimi_k25
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk
from tests.variants.deepseek import TINY

IMAGE = 60  # the id of image tokens
# a table of 5 x 5 positions, which no image has
_VISION: dict[str, Any] = {"model_type": "kimi_k25_vision", "hidden_size": 32, "intermediate_size": 40}
_VISION |= {"num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4, "pos_emb_height": 5, "pos_emb_width": 5}
_TEXT = TINY | {"num_attention_heads": 4, "num_key_value_heads": 4}
VALUES = {"model_type": "kimi_k25", "image_token_id": IMAGE, "video_token_id": 59, "vision_start_token_id": 58}
VALUES |= {"vision_end_token_id": 57, "tie_word_embeddings": False, "projection_hidden_size": 32}
VALUES |= {"projection_layer_norm_eps": 1e-2, "vision_config": _VISION, "text_config": _TEXT}
VARIANTS = {"kimi_k25": VALUES}
STRUCTURES = ()  # its text is DeepSeek's, and its images are like those of others
DOCUMENTS: tuple[list[Any], ...] = ([2, (2, 3), 3], [5, (1, 4), 1, (3, 2), 4], [3], [(2, 2), 2])
_CONFIG = kimi_k25.Config.from_hf(VALUES)


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    config._attn_implementation = "eager"
    config.text_config._experts_implementation = "eager"
    model = wrappers.perturbed(AutoModelForImageTextToText.from_config(config))
    return wrappers.with_generic_buffers(model)


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _CONFIG)


def pixels(images: list[Tensor]) -> dict[str, Tensor]:
    """What transformers takes: patches [n, 3, p, p] row by row, and grids."""
    cells = [patches_of(image, 4) for image in images]
    grids = torch.tensor([(1, *one.shape[:2]) for one in cells])
    return {"pixel_values": torch.cat([one.reshape(-1, 3, 4, 4) for one in cells]), "image_grid_thw": grids}


def _ours(params: Any, **bug: bool) -> tuple[Tensor, Tensor]:
    return wrappers.cell_logits(kimi_k25, _CONFIG, DOCUMENTS, IMAGE, params, **bug)


def _theirs() -> Tensor:
    return wrappers.alone(_reference("kimi_k25"), DOCUMENTS, IMAGE, 8, pixels=pixels)


def test_packed_documents_with_images_equal_transformers_alone() -> None:
    with torch.no_grad():
        wanted = _theirs()
        logits, segment_ids = _ours(_params("kimi_k25"))
        assert_close(logits[segment_ids > 0], wanted)
        assert (_ours(_params("kimi_k25"), reverse=True)[0][segment_ids > 0] - wanted).abs().max() > 1e-2


def test_gradients_equal_transformers() -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params("kimi_k25"))
    logits, segment_ids = _ours(params)
    logits[segment_ids > 0].square().sum().backward()
    model = _reference("kimi_k25")
    model.zero_grad()
    _theirs().square().sum().backward()
    wrappers.assert_gradients(model, _CONFIG, params)


def test_files_are_read_and_written(tmp_path: Path) -> None:
    wrappers.assert_files(_reference("kimi_k25"), _CONFIG, tmp_path)


def test_published_files_are_read() -> None:
    """They have other names in the tower's object, and the text's type is kimi_k2."""
    names = {"hidden_size": "vt_hidden_size", "intermediate_size": "vt_intermediate_size"}
    names |= {"num_hidden_layers": "vt_num_hidden_layers", "num_attention_heads": "vt_num_attention_heads"}
    names |= {"pos_emb_height": "init_pos_emb_height", "pos_emb_width": "init_pos_emb_width"}
    tower: dict[str, Any] = {names.get(name, name): value for name, value in _VISION.items() if name != "model_type"}
    tower |= {"init_pos_emb_time": 4, "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mm_hidden_size": 32}
    tower |= {"mm_projector_type": "patchmerger", "pos_emb_type": "divided_fixed", "projector_hidden_act": "gelu"}
    tower |= {"projector_ln_eps": 1e-2, "text_hidden_size": 32, "video_attn_type": "spatial_temporal"}
    outer = {"model_type": "kimi_k25", "media_placeholder_token_id": IMAGE, "vision_config": tower}
    text = {name: value for name, value in _TEXT.items() if name != "tie_word_embeddings"}
    assert kimi_k25.Config.from_hf(outer | {"text_config": text | {"model_type": "kimi_k2"}}) == _CONFIG
    with pytest.raises(ValueError, match=r"'merge_type' is .*other"):
        kimi_k25.Config.from_hf(outer | {"vision_config": tower | {"merge_type": "other"}, "text_config": text})

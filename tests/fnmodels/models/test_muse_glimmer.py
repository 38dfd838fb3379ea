"""Muse Glimmer with images equals transformers with every parameter perturbed; packed documents equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from fnmodels import tree
from fnmodels.inputs.images import patches_of
from fnmodels.models.vision_language import muse_glimmer
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk
from tests.variants.muse_glimmer import TINY

IMAGE = 60  # the id of image tokens
# a table and windows of 3 x 3 patches, which no image has
_VISION: dict[str, Any] = {"model_type": "muse_glimmer_vision", "hidden_size": 32, "intermediate_size": 40}
_VISION |= {"num_hidden_layers": 3, "num_attention_heads": 4, "patch_size": 4, "pos_emb_height": 3, "pos_emb_width": 3}
_VISION |= {"layer_types": ["window_attention", "full_attention", "window_attention"]}
VALUES = {"model_type": "muse_glimmer", "image_token_id": IMAGE, "video_token_id": 59, "vision_config": _VISION}
VALUES |= {"text_config": TINY, "out_hidden_size": 128, "projector_hidden_size": 28, "tie_word_embeddings": False}
CONFIG = muse_glimmer.Config.from_hf(VALUES)
DOCUMENTS: tuple[list[Any], ...] = ([2, (2, 3), 3], [5, (1, 4), 1, (3, 2), 4], [3], [(2, 2), 2])


@functools.cache
def _reference() -> Any:
    config = AutoConfig.for_model(**VALUES)
    config._attn_implementation = "eager"
    return wrappers.perturbed(AutoModelForImageTextToText.from_config(config))


@functools.cache
def _params() -> Any:
    return wrappers.ours_of(on_disk(_reference()), CONFIG)


def pixels(images: list[Tensor]) -> dict[str, Tensor]:
    """What transformers takes: patches [n, 2 3 p p], two equal frames one after the other, and grids."""
    cells = [patches_of(image, 4) for image in images]
    grids = torch.tensor([(1, *one.shape[:2]) for one in cells])
    return {"pixel_values": torch.cat([one.flatten(0, 1).repeat(1, 2) for one in cells]), "image_grid_thw": grids}


def _ours(params: Any, **bug: bool) -> tuple[Tensor, Tensor]:
    return wrappers.cell_logits(muse_glimmer, CONFIG, DOCUMENTS, IMAGE, params, **bug)


def _theirs() -> Tensor:
    return wrappers.alone(_reference(), DOCUMENTS, IMAGE, 8, pixels=pixels)


def test_packed_documents_with_images_equal_transformers_alone() -> None:
    with torch.no_grad():
        wanted = _theirs()
        logits, segment_ids = _ours(_params())
        assert_close(logits[segment_ids > 0], wanted)
        assert (_ours(_params(), reverse=True)[0][segment_ids > 0] - wanted).abs().max() > 1e-2


def test_gradients_equal_transformers() -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params())
    logits, segment_ids = _ours(params)
    logits[segment_ids > 0].square().sum().backward()
    model = _reference()
    model.zero_grad()
    _theirs().square().sum().backward()
    wrappers.assert_gradients(model, CONFIG, params)


def test_files_are_read_and_written(tmp_path: Path) -> None:
    wrappers.assert_files(_reference(), CONFIG, tmp_path)
    wrappers.assert_text_alone(CONFIG, tmp_path)


def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="out_hidden_size is 64; a cell is 128 wide"):
        muse_glimmer.Config.from_hf(VALUES | {"out_hidden_size": 64})
    with pytest.raises(ValueError, match=r"'layer_norm_eps' is 0\.01; only 1e-05 is supported"):
        muse_glimmer.Config.from_hf(VALUES | {"vision_config": _VISION | {"layer_norm_eps": 0.01}})
    with pytest.raises(ValueError, match=r"'layer_rope_theta' is .* must have 0 or 50, the rope_theta"):
        muse_glimmer.Config.from_hf(VALUES | {"text_config": TINY | {"layer_rope_theta": [50.0, 60.0, 0, 0]}})

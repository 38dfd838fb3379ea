"""EXAONE 4.5 equals transformers with every parameter perturbed; packed documents with images equal each alone."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.models.vision_language import exaone4_5
from tests.support import wrappers
from tests.support.cases import generic_params, off
from tests.support.oracle import assert_close, on_disk
from tests.variants.exaone4 import variants

IMAGE = 60  # the id of image tokens
_TEXT = next(iter(variants().values())) | {"num_nextn_predict_layers": 0}
_VISION: dict[str, Any] = {"model_type": "exaone4_5_vision", "depth": 3, "hidden_size": 32, "intermediate_size": 40}
_VISION |= {"num_heads": 4, "num_key_value_heads": 2, "patch_size": 4, "out_hidden_size": _TEXT["hidden_size"]}
_VISION |= {"window_size": 16, "fullatt_block_indexes": [1]}
VALUES = {"model_type": "exaone4_5", "image_token_id": IMAGE, "video_token_id": 59, "vision_config": _VISION}
VALUES |= {"text_config": _TEXT, "tie_word_embeddings": False}
VARIANTS = {"exaone4_5": VALUES}
STRUCTURES = ()  # its text is EXAONE 4's, and its images are like Qwen's
DOCUMENTS: tuple[list[Any], ...] = ([2, (2, 3), 3], [5, (1, 4), 1, (3, 2), 4], [3], [(2, 2), 2])
_CONFIG = exaone4_5.Config.from_hf(VALUES)


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    config._attn_implementation = "eager"
    return wrappers.perturbed(AutoModelForImageTextToText.from_config(config))


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _CONFIG)


def pixels(images: list[Tensor]) -> dict[str, Tensor]:
    """What transformers takes: patches cell by cell, and grids."""
    grids = torch.tensor([(1, image.shape[1] // 4, image.shape[2] // 4) for image in images])
    return {"pixel_values": torch.cat([wrappers.merged_patches(one, 4) for one in images]), "image_grid_thw": grids}


def _theirs() -> Tensor:
    return wrappers.alone(_reference("exaone4_5"), DOCUMENTS, IMAGE, 8, pixels=pixels)


def _ours(params: Any, **bug: bool) -> tuple[Tensor, Tensor]:
    return wrappers.cell_logits(exaone4_5, _CONFIG, DOCUMENTS, IMAGE, params, **bug)


def test_packed_documents_with_images_equal_transformers_alone() -> None:
    with torch.no_grad():
        wanted = _theirs()
        logits, segment_ids = _ours(_params("exaone4_5"))
        assert_close(logits[segment_ids > 0], wanted)
        assert (_ours(_params("exaone4_5"), reverse=True)[0][segment_ids > 0] - wanted).abs().max() > 1e-2


def test_gradients_equal_transformers() -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params("exaone4_5"))
    logits, segment_ids = _ours(params)
    logits[segment_ids > 0].square().sum().backward()
    model = _reference("exaone4_5")
    model.zero_grad()
    _theirs().square().sum().backward()
    wrappers.assert_gradients(model, _CONFIG, params)


def test_files_are_read_and_written(tmp_path: Path) -> None:
    wrappers.assert_files(_reference("exaone4_5"), _CONFIG, tmp_path)


def test_the_first_releases_name_of_the_text_is_read() -> None:
    first = VALUES | {"text_config": _TEXT | {"model_type": "exaone4_5_text"}}
    assert exaone4_5.Config.from_hf(first) == _CONFIG
    with pytest.raises(ValueError, match="out_hidden_size 8 of vision_config is not the hidden_size"):
        exaone4_5.Config.from_hf(VALUES | {"vision_config": _VISION | {"out_hidden_size": 8}})
    assert fnmodels.models.common.registry.every_model()["exaone4_5"].endswith("exaone4_5")


def test_the_text_has_the_mtp_head_of_the_files(tmp_path: Path) -> None:
    """Files have it under mtp.*, and no field that says so."""
    one = replace(_CONFIG, text=replace(_CONFIG.text, num_nextn_predict_layers=1))
    text = {name: value for name, value in _TEXT.items() if name != "num_nextn_predict_layers"}
    assert exaone4_5.Config.from_hf(VALUES | {"text_config": text}) == one == exaone4_5.Config.from_hf(one.to_hf())
    assert exaone4_5.Config.from_hf(VALUES | {"text_config": text, "num_nextn_predict_layers": 0}) == _CONFIG
    params = generic_params(one)
    P.save_pretrained(tmp_path, one, params)
    names = {name for name in load_file(tmp_path / "model.safetensors") if name.startswith("mtp.")}
    around = {f"mtp.{name}.weight" for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    assert names > around and all(name.startswith("mtp.layers.0.") for name in names - around)
    config, found = P.load_pretrained(tmp_path, part="text")
    assert config == one.text and found.keys() >= {"mtp"} and off(found, params["text"]) == 0
    whole, found = P.load_pretrained(tmp_path)
    assert whole == one and off(found, params) == 0
    whole, found = P.load_pretrained(tmp_path, drop=("mtp",))
    assert whole == _CONFIG and "mtp" not in found["text"]
    assert "mtp" not in P.load_pretrained(tmp_path, part="text", drop=("mtp",))[1]

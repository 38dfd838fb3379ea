"""Mistral 3 with images equals transformers with every parameter perturbed; packed documents equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

import fnmodels
from fnmodels import tree
from fnmodels.models.vision_language import mistral3
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

IMAGE = 60  # the id of image tokens
_VISION: dict[str, Any] = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
_VISION |= {"num_attention_heads": 4, "image_size": 24, "patch_size": 4}
_TEXT: dict[str, Any] = {"model_type": "mistral", "hidden_size": 24, "intermediate_size": 40, "vocab_size": 61}
_TEXT |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_TEXT |= {"rms_norm_eps": 7e-3, "max_position_embeddings": 64, "sliding_window": None}
_TEXT |= {"bos_token_id": 1, "eos_token_id": 2}
VALUES = {"model_type": "mistral3", "image_token_index": IMAGE, "vision_config": _VISION, "text_config": _TEXT}
VARIANTS = {
    "mistral3": VALUES | {"tie_word_embeddings": False},
    "mistral3_bias": VALUES | {"multimodal_projector_bias": True},
}
_OCR = {"model_type": "lighton_ocr", "image_token_id": IMAGE, "vision_config": _VISION}
VARIANTS["lighton_ocr"] = _OCR | {"text_config": _TEXT | {"model_type": "qwen3"}}
STRUCTURES = ("mistral3", "mistral3_bias")  # for the tests of all readers of images
DOCUMENTS: tuple[list[Any], ...] = ([2, (2, 3), 3], [5, (1, 4), 1, (3, 2), 4], [3], [(2, 2), 2])


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    config._attn_implementation = "eager"
    return wrappers.perturbed(AutoModelForImageTextToText.from_config(config))


def _config(name: str) -> mistral3.Config:
    return mistral3.Config.from_hf(VARIANTS[name])


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


def _ours(params: Any, config: mistral3.Config, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """(logits [2, 36, V], segment ids), two documents in each row; planted bug: patches of a cell by columns."""
    texts, images = wrappers.documents_with_grids(DOCUMENTS, IMAGE, 8)
    tokens, segment_ids = wrappers.rows_of((texts[:2], texts[2:]), 36)
    flat = [image for own in images for image in own]
    patches, at, image_ids = fnmodels.inputs.patch_rows(flat, config.vision, length=50)
    batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
    x = fnmodels.forward(params["vision"], *batch, config=config.vision)
    where = mistral3.cells(at, image_ids, config.merge)
    features = mistral3.project(params, x, where[:, [0, 2, 1, 3]] if transposed else where, config=config)
    own = fnmodels.positions_from_segments(segment_ids)
    inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=own, segment_ids=segment_ids)
    places = mistral3.image_places(tokens, IMAGE, torch.ones(features.shape[:2], dtype=torch.bool))
    inputs = mistral3.with_images(params, inputs, features, places, config=config)
    logits: Tensor = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text, kernel="math")
    return logits, segment_ids


def _theirs(model: Any) -> Tensor:
    """[tokens, V]: every document alone, and its images each padded to the size of the largest."""
    out = []
    for text, images in zip(*wrappers.documents_with_grids(DOCUMENTS, IMAGE, 8), strict=True):
        pixels: dict[str, Any] = {}
        if images:
            sizes = [tuple(image.shape[1:]) for image in images]
            square = torch.zeros(len(images), 3, max(h for h, _ in sizes), max(w for _, w in sizes))
            for one, image in zip(square, images, strict=True):
                one[:, : image.shape[1], : image.shape[2]] = image
            pixels = {"pixel_values": square, "image_sizes": torch.tensor(sizes)}
        out.append(model(input_ids=text[None], **pixels).logits[0])
    return torch.cat(out)


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_documents_with_images_equal_transformers_alone(name: str) -> None:
    with torch.no_grad():
        wanted = _theirs(_reference(name))
        logits, segment_ids = _ours(_params(name), _config(name))
        assert_close(logits[segment_ids > 0], wanted)
        wrong = _ours(_params(name), _config(name), transposed=True)[0]
        assert (wrong[segment_ids > 0] - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["mistral3_bias", "lighton_ocr"])
def test_gradients_equal_transformers(name: str) -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params(name))
    logits, segment_ids = _ours(params, _config(name))
    logits[segment_ids > 0].square().sum().backward()
    model = _reference(name)
    model.zero_grad()
    _theirs(model).square().sum().backward()
    wrappers.assert_gradients(model, _config(name), params)


@pytest.mark.parametrize("name", VARIANTS)
def test_files_are_read_and_written(name: str, tmp_path: Path) -> None:
    wrappers.assert_files(_reference(name), _config(name), tmp_path)


def test_heads_of_older_files_are_tied_as_their_text_says() -> None:
    old = VALUES | {"transformers_version": "4.50.0"}
    assert not mistral3.Config.from_hf(old).text.tie_word_embeddings
    assert mistral3.Config.from_hf(
        old | {"text_config": _TEXT | {"tie_word_embeddings": True}}
    ).text.tie_word_embeddings
    assert mistral3.Config.from_hf(VALUES | {"transformers_version": "5.1.0"}).text.tie_word_embeddings


def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="'vision_feature_layer' is -2; only -1"):
        mistral3.Config.from_hf(VALUES | {"vision_feature_layer": -2})
    _, at, image_ids = fnmodels.inputs.patch_rows([torch.zeros(3, 12, 16)], _config("mistral3").vision)
    with pytest.raises(ValueError, match="An image of 3 x 4 patches has no cells of 2 x 2"):
        mistral3.cells(at, image_ids, 2)

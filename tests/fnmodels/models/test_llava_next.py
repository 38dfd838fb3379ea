"""Tiled pictures with newlines equal transformers with every parameter perturbed; packed documents equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

import fnmodels
from fnmodels import tree
from fnmodels.image_text import image_grid
from fnmodels.inputs.image_sizes import TiledImage
from fnmodels.models.vision_language import llava_next
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

IMAGE = 60  # the id of image tokens
_VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
_VISION |= {"num_attention_heads": 4, "image_size": 8, "patch_size": 4, "layer_norm_eps": 1e-2}
_TEXT: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT |= {"num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 128, "rms_norm_eps": 7e-3}
_OUTER = {"image_token_index": IMAGE, "image_grid_pinpoints": [[8, 16], [16, 8], [16, 16], [8, 24]]}
_CLIP = _OUTER | {"text_config": _TEXT | {"model_type": "llama"}}
_CLIP |= {"vision_config": _VISION | {"model_type": "clip_vision_model"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "llava_next": _CLIP | {"model_type": "llava_next"},
    "llava_next_video": _CLIP | {"model_type": "llava_next_video", "video_token_index": 59},
    "llava_onevision": _OUTER
    | {"model_type": "llava_onevision", "vision_aspect_ratio": "anyres_max_2", "video_token_index": 59}
    | {"text_config": _TEXT | {"model_type": "qwen2"}}
    | {"vision_config": _VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}},
}
STRUCTURES = ("llava_next",)  # for the tests of all readers of images
SIZES = ((14, 16), (6, 33), (24, 9), (50, 48))  # of pictures, which are padded on the right and below, or shrunk
every_variant = pytest.mark.parametrize("name", VARIANTS)


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    config._attn_implementation = "eager"
    model = AutoModelForImageTextToText.from_config(config)
    return wrappers.perturbed(model)


@functools.cache
def _config(name: str) -> llava_next.Config:
    return llava_next.Config.from_hf(VARIANTS[name])


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


def picture(config: llava_next.Config, size: tuple[int, int], generator: torch.Generator) -> TiledImage:
    rows, columns = llava_next._tiles_of(size, config)
    return TiledImage(torch.randn(1 + rows * columns, 3, 8, 8, generator=generator), size)


def _documents(name: str) -> tuple[list[Tensor], list[list[TiledImage]]]:
    """(tokens of each document, its pictures)."""
    generator, config, texts, pictures = torch.Generator().manual_seed(0), _config(name), [], []
    for parts in ((2, SIZES[0], 3), (4, SIZES[1], 1, SIZES[2]), (3,), (1, SIZES[3], 2)):
        own = [picture(config, one, generator) for one in parts if not isinstance(one, int)]
        counts = iter([llava_next.feature_count(len(one.tiles), one.size, config=config) for one in own])
        runs = [
            torch.randint(1, 57, (one,), generator=generator)
            if isinstance(one, int)
            else torch.full((next(counts),), IMAGE)
            for one in parts
        ]
        texts.append(torch.cat(runs))
        pictures.append(own)
    return texts, pictures


def _ours(name: str, params: Any, *, reverse: bool = False) -> tuple[Tensor, Tensor]:
    """(logits [2, S, V], segment ids); reverse: a planted bug, the tiles of each picture in the opposite order."""
    config = _config(name)
    texts, pictures = _documents(name)
    flat = [one for own in pictures for one in own]
    tokens, segment_ids = wrappers.rows_of((texts[:2], texts[2:]), max(len(texts[0]) + len(texts[1]), 100))
    (weights, tower), features = llava_next.tower(params, config), []
    for one in flat:
        tiles = torch.cat((one.tiles[:1], one.tiles[1:].flip(0))) if reverse else one.tiles
        patches, at, ids = fnmodels.inputs.patch_rows(list(tiles), tower, length=80)
        x = fnmodels.hidden(
            weights, *fnmodels.prepare(tower, patches, positions=at, segment_ids=ids), config=tower, taps=()
        )
        (found,) = llava_next.features_of(params, x, {}, llava_next.cells(at, ids, 1), config=config)
        features.append(llava_next.arranged(params, found, one.size, config=config))
    joined = torch.cat(features, 1)
    own = fnmodels.positions_from_segments(segment_ids)
    inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=own, segment_ids=segment_ids)
    places = llava_next.image_places(tokens, IMAGE, torch.ones(joined.shape[:2], dtype=torch.bool))
    inputs = llava_next.with_images(params, inputs, joined, places, config=config)
    logits: Tensor = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text, kernel="math")
    return logits, segment_ids


def pixels(pictures: list[TiledImage]) -> dict[str, Tensor]:
    """What transformers takes: tiles, padded to the most, and sizes."""
    most = max(len(one.tiles) for one in pictures)
    padded = [torch.nn.functional.pad(one.tiles, (0, 0, 0, 0, 0, 0, 0, most - len(one.tiles))) for one in pictures]
    return {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor([one.size for one in pictures])}


def _theirs(name: str) -> Tensor:
    """[tokens, V]: every document alone, one after the other."""
    out, model = [], _reference(name)
    for text, pictures in zip(*_documents(name), strict=True):
        given = pixels(pictures) if pictures else {}
        out.append(model(input_ids=text[None], use_cache=False, **given).logits[0])
    return torch.cat(out)


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


def test_errors_name_what_does_not_fit() -> None:
    config = _config("llava_next")
    with pytest.raises(ValueError, match="A picture of 14 x 16 pixels has 2 x 2 tiles and one of the whole, not 3"):
        llava_next.feature_count(3, (14, 16), config=config)
    with pytest.raises(ValueError, match="image_grid_pinpoints must be multiples of a tile's 8 pixels"):
        llava_next.Config.from_hf(VARIANTS["llava_next"] | {"image_grid_pinpoints": [[8, 20]]})
    with pytest.raises(ValueError, match=r"'vision_aspect_ratio' is .*square.*; anyres_max_N is supported"):
        llava_next.Config.from_hf(VARIANTS["llava_onevision"] | {"vision_aspect_ratio": "square"})
    with pytest.raises(TypeError, match=r"An image of llava_next is a .*TiledImage, not a Tensor"):
        image_grid(torch.zeros(3, 8, 8), config=config)

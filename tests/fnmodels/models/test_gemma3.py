"""Gemma 3 with images equals transformers with every parameter perturbed; packed documents equal each alone.

transformers applies the first document's spans to every document of a packed row, so each document alone is the oracle.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

import fnmodels
from fnmodels import tree
from fnmodels.inputs.image_places import cells, gather_cells, image_spans
from fnmodels.models.vision_language import gemma3
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

IMAGE = 60  # the id of image tokens
VISION = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
VISION |= {"num_attention_heads": 4, "image_size": 24, "patch_size": 4, "layer_norm_eps": 1e-2}
TEXT: dict[str, Any] = {"model_type": "gemma3_text", "hidden_size": 24, "intermediate_size": 40, "vocab_size": 61}
TEXT |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TEXT |= {"sliding_window": 6, "rms_norm_eps": 7e-3, "max_position_embeddings": 64, "query_pre_attn_scalar": 12}
TEXT |= {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
VALUES = {"model_type": "gemma3", "image_token_index": IMAGE, "mm_tokens_per_image": 9, "vision_config": VISION}
VALUES |= {"text_config": TEXT, "boi_token_index": 58, "eoi_token_index": 59}
CONFIG = gemma3.Config.from_hf(VALUES | {"vision_config": VISION | {"vision_use_head": False}})
# Per document, the numbers of text tokens before, between and after its images of 9 tokens, longer than the window.
DOCUMENTS = ((2, 3), (5, 1, 4), (3,), (0, 2))


@functools.cache
def _reference() -> Any:
    config = Gemma3Config(**VALUES | {"vision_config": VISION | {"vision_use_head": False}})
    config._attn_implementation = "eager"
    return wrappers.perturbed(Gemma3ForConditionalGeneration(config))


@functools.cache
def _params() -> Any:
    return wrappers.ours_of(on_disk(_reference()), CONFIG)


@functools.cache
def _documents() -> tuple[list[Tensor], list[list[Tensor]]]:
    """(tokens of each document, its images [3, 24, 24])."""
    generator = torch.Generator().manual_seed(0)
    texts, images = [], []
    for lengths in DOCUMENTS:
        runs = [torch.randint(1, 58, (n,), generator=generator) for n in lengths]
        texts.append(torch.cat([part for run in runs for part in (run, torch.full((9,), IMAGE))][:-1]))
        images.append([torch.randn(3, 24, 24, generator=generator) for _ in runs[1:]])
    return texts, images


def _ours(params: Any, *, first_spans: bool = False, causal: bool = False) -> tuple[Tensor, Tensor]:
    """(logits [2, 48, V], segment ids), two documents in each row; planted bugs: spans of row 0 in all rows, none."""
    texts, images = _documents()
    tokens, segment_ids = wrappers.rows_of((texts[:2], texts[2:]), 48)
    flat = [image for own in images for image in own]
    patches, at, image_ids = fnmodels.inputs.patch_rows(flat, CONFIG.vision, length=72)  # two images in a row
    batch = fnmodels.prepare(CONFIG.vision, patches, positions=at, segment_ids=image_ids)
    x = fnmodels.forward(params["vision"], *batch, config=CONFIG.vision)
    features = gemma3.project(params, x, cells(at, image_ids, CONFIG.pooled), config=CONFIG)
    own = fnmodels.positions_from_segments(segment_ids)
    inputs, masks, freqs_cis = fnmodels.prepare(CONFIG.text, tokens, positions=own, segment_ids=segment_ids)
    places = gemma3.image_places(tokens, IMAGE, torch.ones(features.shape[:2], dtype=torch.bool))
    inputs = gemma3.with_images(params, inputs, features, places, config=CONFIG)
    if not causal:
        seen = places[:1].expand_as(places) if first_spans else places
        masks = gemma3.image_masks(CONFIG.text, own, segment_ids, seen)
    logits: Tensor = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=CONFIG.text, kernel="math")
    return logits, segment_ids


def _theirs(model: Any) -> Tensor:
    """[tokens, V]: every document alone, one after the other."""
    out = []
    for text, images in zip(*_documents(), strict=True):
        pixels = {"pixel_values": torch.stack(images)} if images else {}
        types = (text == IMAGE).long()[None]
        out.append(model(input_ids=text[None], token_type_ids=types, **pixels).logits[0])
    return torch.cat(out)


def test_packed_documents_with_images_equal_transformers_alone() -> None:
    with torch.no_grad():
        wanted = _theirs(_reference())
        logits, segment_ids = _ours(_params())
        assert_close(logits[segment_ids > 0], wanted)
        for bug in ({"first_spans": True}, {"causal": True}):
            assert (_ours(_params(), **bug)[0][segment_ids > 0] - wanted).abs().max() > 1e-2


def test_gradients_equal_transformers() -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params())
    logits, segment_ids = _ours(params)
    logits[segment_ids > 0].square().sum().backward()
    model = _reference()
    model.zero_grad()
    _theirs(model).square().sum().backward()
    wrappers.assert_gradients(model, CONFIG, params)


def test_files_are_read_and_written(tmp_path: Path) -> None:
    wrappers.assert_files(_reference(), CONFIG, tmp_path)


def test_cells_are_those_of_a_reshape() -> None:
    """Also where an image's patches are permuted in the row."""
    images = [torch.arange(float(h * w)).reshape(1, h, w).expand(3, h, w) for h, w in ((4, 6), (2, 2))]
    config = type("Tower", (), {"patch_size": 1, "num_channels": 3, "special_tokens": 1, "channels_last": False})()
    patches, at, segment_ids = fnmodels.inputs.patch_rows(images, config, length=30)
    order = torch.cat((torch.randperm(25), torch.arange(25, 30)))
    patches, at, segment_ids = patches[:, order], at[:, order], segment_ids[:, order]
    found = gather_cells(patches[..., :1], cells(at, segment_ids, 2))[..., 0]
    wanted = [image[0].unflatten(0, (-1, 2)).unflatten(2, (-1, 2)).transpose(1, 2).reshape(-1, 4) for image in images]
    assert torch.equal(found, torch.cat(wanted))
    with pytest.raises(ValueError, match="4 x 6 patches has no cells of 4 x 4"):
        cells(at, segment_ids, 4)


def test_spans_end_with_documents() -> None:
    places = torch.tensor([[0, 0, -1, 0, 0, 0, -1]])[..., None].expand(-1, -1, 2)
    spans = image_spans(places, torch.tensor([[1, 1, 1, 1, 2, 2, 2]]))
    assert spans.tolist() == [[1, 1, 0, 2, 3, 3, 0]]


def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="image_tokens is 8, but must be the square of a divisor of the 6 patches"):
        gemma3.Config.from_hf(VALUES | {"mm_tokens_per_image": 8})
    with pytest.raises(ValueError, match="'use_bidirectional_attention' must be false"):
        gemma3.Config.from_hf(VALUES | {"text_config": TEXT | {"use_bidirectional_attention": True}})
    with pytest.raises(ValueError, match="'tie_word_embeddings' is true; only false"):
        gemma3.Config.from_hf(
            VALUES | {"tie_word_embeddings": True, "text_config": TEXT | {"tie_word_embeddings": False}}
        )

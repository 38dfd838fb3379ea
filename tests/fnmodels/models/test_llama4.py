"""Llama 4 with images equals transformers with every parameter perturbed; packed documents equal each alone."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, Llama4ForConditionalGeneration

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.models.vision import llama4_vision
from fnmodels.models.vision_language import llama4
from tests.parity.test_llama4 import PUBLISHED_VISION, TOTALS
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk
from tests.variants.llama4 import TINY, published

IMAGE = 50  # the id of image tokens
_VISION: dict[str, Any] = {"model_type": "llama4_vision_model", "hidden_size": 32, "num_hidden_layers": 2}
_VISION |= {"num_attention_heads": 4, "intermediate_size": 128, "image_size": 24, "patch_size": 4}
_VISION |= {"vision_output_dim": 20, "projector_input_dim": 20, "projector_output_dim": 20}
VALUES = {"model_type": "llama4", "image_token_index": IMAGE, "boi_token_index": 48, "eoi_token_index": 49}
VALUES |= {"vision_config": _VISION, "text_config": TINY}
CONFIG = llama4.Config.from_hf(VALUES)
# Per document, the numbers of text tokens before, between and after its images of 9 cells, longer than a chunk.
DOCUMENTS = ((2, 3), (5, 1, 4), (3,), (0, 2))


@functools.cache
def _reference() -> Any:
    config = AutoConfig.for_model(**VALUES)
    config._attn_implementation = "eager"
    return wrappers.perturbed(Llama4ForConditionalGeneration(config))


@functools.cache
def _params() -> Any:
    return wrappers.ours_of(on_disk(_reference()), CONFIG)


@functools.cache
def _documents() -> tuple[list[Tensor], list[list[Tensor]]]:
    """(tokens of each document, its tiles [3, 24, 24])."""
    generator = torch.Generator().manual_seed(0)
    texts, images = [], []
    for lengths in DOCUMENTS:
        runs = [torch.randint(1, 48, (n,), generator=generator) for n in lengths]
        texts.append(torch.cat([part for run in runs for part in (run, torch.full((9,), IMAGE))][:-1]))
        images.append([torch.randn(3, 24, 24, generator=generator) for _ in runs[1:]])
    return texts, images


def _ours(params: Any, *, exchanged: bool = False) -> tuple[Tensor, Tensor]:
    """(logits [2, 48, V], segment ids), two documents in each row; planted bug: rows and columns exchanged."""
    texts, images = _documents()
    tokens, segment_ids = wrappers.rows_of((texts[:2], texts[2:]), 48)
    flat = [image for own in images for image in own]
    patches, at, image_ids = fnmodels.inputs.patch_rows(flat, CONFIG.vision, length=80)  # two tiles in a row
    shown = at[..., [1, 0, 3, 2]] if exchanged else at
    batch = fnmodels.prepare(CONFIG.vision, patches, positions=shown, segment_ids=image_ids)
    x = fnmodels.forward(params["vision"], *batch, config=CONFIG.vision)
    features = llama4.project(params, x, llama4.cells(at, image_ids, CONFIG.vision.merge))
    own = fnmodels.positions_from_segments(segment_ids)
    inputs, masks, freqs_cis = fnmodels.prepare(CONFIG.text, tokens, positions=own, segment_ids=segment_ids)
    places = llama4.image_places(tokens, IMAGE, torch.ones(features.shape[:2], dtype=torch.bool))
    inputs = llama4.with_images(params, inputs, features, places, config=CONFIG)
    logits: Tensor = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=CONFIG.text, kernel="math")
    return logits, segment_ids


def _theirs(model: Any) -> Tensor:
    """[tokens, V]: every document alone, one after the other, by the parts: 5.24's forward of the whole raises."""
    out = []
    for text, images in zip(*_documents(), strict=True):
        x = model.get_input_embeddings()(text[None])
        if images:
            seen = model.get_image_features(pixel_values=torch.stack(images), return_dict=True).last_hidden_state
            features = model.multi_modal_projector(seen.flatten(0, -2))
            x = x.masked_scatter((text == IMAGE)[None, :, None], features)
        out.append(model.language_model(inputs_embeds=x, use_cache=False).logits[0])
    return torch.cat(out)


def test_packed_documents_with_images_equal_transformers_alone() -> None:
    with torch.no_grad():
        wanted = _theirs(_reference())
        logits, segment_ids = _ours(_params())
        assert_close(logits[segment_ids > 0], wanted)
        assert (_ours(_params(), exchanged=True)[0][segment_ids > 0] - wanted).abs().max() > 1e-2


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
    wrappers.assert_text_alone(CONFIG, tmp_path)


def test_published_totals() -> None:
    for name, total in TOTALS.items():
        text = published()[name]["text_config"]
        config = llama4.Config.from_hf({"model_type": "llama4", "text_config": text, "vision_config": PUBLISHED_VISION})
        assert P.count(config) == total


def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="'intermediate_size' is 100; only 128 is supported"):
        llama4.Config.from_hf(VALUES | {"vision_config": _VISION | {"intermediate_size": 100}})
    with pytest.raises(ValueError, match="'projector_input_dim' is 24; only 20"):
        llama4.Config.from_hf(VALUES | {"vision_config": _VISION | {"projector_input_dim": 24}})


def test_a_folder_of_the_tower_alone(tmp_path: Path) -> None:
    """With the MLP that pools cells, which is the projector's in Llama 4; and saved again."""
    tower, images = _reference().vision_model, _documents()[1][1]
    tower.save_pretrained(tmp_path / "theirs")
    config, params = P.load_pretrained(tmp_path / "theirs")
    assert config == dataclasses.replace(CONFIG.vision, adapter=1)
    patches, at, image_ids = fnmodels.inputs.patch_rows(images, config, length=80)
    batch = fnmodels.prepare(config, patches, positions=at, segment_ids=image_ids)
    x = fnmodels.forward(params, *batch, config=config, kernel="math")
    features = llama4_vision.adapted(params["adapter"], x, llama4.cells(at, image_ids, config.merge))
    with torch.no_grad():
        assert_close(features[0], tower(torch.stack(images)).last_hidden_state.flatten(0, 1))
    P.save_pretrained(tmp_path / "ours", config, params)
    again, told = type(tower).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(told.values()), told
    assert all(torch.equal(value, tower.state_dict()[path]) for path, value in again.state_dict().items())
    P.save_pretrained(tmp_path / "part", CONFIG.vision, _params()["vision"])
    assert P.load_pretrained(tmp_path / "part")[0] == CONFIG.vision

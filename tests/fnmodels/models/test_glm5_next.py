"""GLM 5.3 with images equals transformers with every parameter perturbed; packed documents equal each alone."""

import copy
import functools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.image_text import image_features
from fnmodels.inputs.image_sizes import padded_to_cells
from fnmodels.models.common import storage
from fnmodels.models.vision import glm4v_vision
from fnmodels.models.vision_language import glm5_next
from params.checkpoint.tensor_map import stored_leaves
from tests.support import wrappers
from tests.support.cases import generic_params, off
from tests.support.oracle import assert_close, on_disk
from tests.variants.glm5_next import TINY, published, variants

IMAGE = 60  # the id of image tokens
_VISION: dict[str, Any] = {"model_type": "glm5_next_vision", "depth": 2, "hidden_size": 32, "intermediate_size": 20}
_VISION |= {"num_heads": 4, "patch_size": 4, "out_hidden_size": TINY["hidden_size"], "rms_norm_eps": 1e-2}
_VISION |= {"projection_intermediate_size": 28, "swiglu_limit": 0.9}
_VISION |= {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}}
_OUTER: dict[str, Any] = {"model_type": "glm5_next", "image_token_id": IMAGE, "video_token_id": 59}
_OUTER |= {"image_start_token_id": 58, "image_end_token_id": 57, "video_start_token_id": 56, "video_end_token_id": 55}
_TIED = variants()["glm5_next_groups_tied"]
VARIANTS = {
    "glm5_next": _OUTER | {"vision_config": _VISION, "text_config": TINY},
    "glm5_next_tied": _OUTER
    | {"vision_config": _VISION | {"attention_bias": False, "hidden_act": "gelu"}, "text_config": _TIED}
    | {"tie_word_embeddings": True},
}
STRUCTURES = ("glm5_next",)  # for the tests of all readers of images
DOCUMENTS: tuple[list[Any], ...] = ([2, (2, 3), 3], [5, (1, 4), 1, (3, 2), 4], [3], [(2, 2), 2])
every_variant = pytest.mark.parametrize("name", VARIANTS)


@functools.cache
def _config(name: str) -> glm5_next.Config:
    return glm5_next.Config.from_hf(VARIANTS[name])


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**copy.deepcopy(VARIANTS[name]))
    config._attn_implementation = "eager"
    config.text_config._experts_implementation = "eager"
    model = wrappers.perturbed(AutoModelForImageTextToText.from_config(config))
    return wrappers.with_generic_buffers(model)


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


def pixels(images: list[Tensor]) -> dict[str, Tensor]:
    """What transformers takes: patches cell by cell, and grids."""
    grids = torch.tensor([(1, image.shape[1] // 4, image.shape[2] // 4) for image in images])
    return {"pixel_values": torch.cat([wrappers.merged_patches(one, 4) for one in images]), "image_grid_thw": grids}


def _theirs(name: str) -> Tensor:
    return wrappers.alone(_reference(name), DOCUMENTS, IMAGE, 8, pixels=pixels)


def _ours(name: str, params: Any, **bug: bool) -> tuple[Tensor, Tensor]:
    return wrappers.cell_logits(glm5_next, _config(name), DOCUMENTS, IMAGE, params, **bug)


@every_variant
def test_packed_documents_with_images_equal_transformers_alone(name: str) -> None:
    with torch.no_grad():
        wanted = _theirs(name)
        logits, segment_ids = _ours(name, _params(name))
        assert_close(logits[segment_ids > 0], wanted)
        assert (_ours(name, _params(name), reverse=True)[0][segment_ids > 0] - wanted).abs().max() > 1e-2


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
    wrappers.assert_text_alone(_config(name), tmp_path)


@pytest.mark.parametrize("part", ["tower", "merger"])
def test_a_limit_that_is_left_out_is_found(part: str) -> None:
    config, params = _config("glm5_next"), _params("glm5_next")
    free = replace(config, vision=replace(config.vision, swiglu_limit=None))
    image = wrappers.documents_with_grids(DOCUMENTS, IMAGE, 8)[1][0][0].repeat_interleave(2, 0)
    patches, at, image_ids = fnmodels.inputs.patch_rows([image], config.vision)
    found = []
    for tower, merger in ((config, config), (free, config) if part == "tower" else (config, free)):
        batch = fnmodels.prepare(tower.vision, patches, positions=at, segment_ids=image_ids)
        x = fnmodels.forward(params["vision"], *batch, config=tower.vision)
        found.append(glm5_next.project(params, x, glm5_next.cells(at, image_ids, 2), config=merger))
    assert (found[0] - found[1]).abs().max() > 1e-2


def test_mtp_layers_that_no_field_counts_are_not_read(tmp_path: Path) -> None:
    config, params = _config("glm5_next"), _params("glm5_next")
    P.save_pretrained(tmp_path, config, params)
    file = tmp_path / "model.safetensors"
    tensors, first = load_file(file), config.text.num_hidden_layers
    mtp = {f"model.language_model.layers.{first}.eh_proj.weight": torch.zeros(4, 4)}
    save_file(tensors | mtp, file, metadata={"format": "pt"})
    for part, wanted in ((None, params), ("text", params["text"])):
        flat, (_, read) = tree.flatten(wanted), P.load_pretrained(tmp_path, part=part, copy=True)
        assert all(torch.equal(leaf, flat[path]) for path, leaf in tree.flatten(read).items())
    stranger = {"model.language_model.layers.1.eh_proj.weight": torch.zeros(4, 4)}
    save_file(tensors | stranger, file, metadata={"format": "pt"})
    with pytest.raises(P.MismatchError, match=r"layers\.1\.eh_proj\.weight' in .*: unexpected"):
        P.load_pretrained(tmp_path)


def test_the_text_has_the_mtp_head_of_the_files(tmp_path: Path) -> None:
    """Alone and in the full model."""
    plain = _config("glm5_next")
    config = replace(plain, text=replace(plain.text, num_nextn_predict_layers=1))
    params, first = generic_params(config), config.text.num_hidden_layers
    P.save_pretrained(tmp_path, config, params)
    assert glm5_next.Config.from_hf(config.to_hf()) == config
    names = [f"{name}.weight" for name in ("eh_proj", "shared_head.norm", "self_attn.indexer.wq_b", "mlp.gate")]
    tensors = load_file(tmp_path / "model.safetensors")
    assert {f"model.language_model.layers.{first}.{name}" for name in names} < tensors.keys()
    text, found = P.load_pretrained(tmp_path, part="text")
    assert text == config.text and found.keys() >= {"mtp"} and off(found, params["text"]) == 0
    text, found = P.load_pretrained(tmp_path, part="text", drop=("mtp",))
    assert text == plain.text and "mtp" not in found
    whole, found = P.load_pretrained(tmp_path)
    assert whole == config and off(found, params) == 0
    whole, found = P.load_pretrained(tmp_path, drop=("mtp",))
    assert whole == plain and "mtp" not in found["text"] and off(found["vision"], params["vision"]) == 0
    lost = f"model.language_model.layers.{first}.hnorm.weight"
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(P.MismatchError, match=rf"{re.escape(lost)}: missing"):
        P.load_pretrained(tmp_path, part="text")


_SIZES = [(20, 44), (8, 8), (3, 5), (64, 64), (40, 90), (12, 300), (128, 31), (200, 210), (33, 401), (7, 20), (1, 90)]


@pytest.mark.parametrize("size", _SIZES)
@pytest.mark.parametrize("bounds", [(1, 10_000), (9, 40), (100, 120), (30, 31), (1, 1)])
def test_pictures_have_the_sizes_of_transformers(size: tuple[int, int], bounds: tuple[int, int]) -> None:
    """A white picture, of which filters change nothing: the rest is the room at the right and below."""
    image = torch.full((3, *size), 255, dtype=torch.uint8)
    how = dict(zip(("min_image_tokens", "max_image_tokens"), bounds, strict=True))
    theirs = Glm5NextImageProcessorPil().resize(image.numpy(), 3, factor=8, temporal_factor=2, **how)
    assert torch.equal(padded_to_cells(image, 8, *bounds), torch.as_tensor(theirs))


def test_errors_name_what_does_not_fit() -> None:
    read, values = glm5_next.Config.from_hf, VARIANTS["glm5_next"]
    for change, words in (
        ({"out_hidden_size": 8}, "out_hidden_size 8 of vision_config is not the hidden_size 32"),
        ({"swiglu_limit": 0}, "'swiglu_limit' is 0, but must be a finite number above 0"),
        ({"hidden_size": 24}, "heads are 6 wide, but must be a multiple of 4"),
        ({"deepstack": [1]}, "deepstack"),
    ):
        with pytest.raises(ValueError, match=words):
            read(values | {"vision_config": _VISION | change})
    image, name = torch.zeros(3, 8, 8, dtype=torch.uint8), str
    with pytest.raises(ValueError, match="'patch_expand_factor' is 2; it must be a number from 1 to 1"):
        glm5_next.read_image(image, {"patch_expand_factor": 2}, name, config=_config("glm5_next"))


def test_the_published_file_is_read() -> None:
    """Its tower has 347 tensors on disk."""
    tower = {"model_type": "glm5_next_vision", "depth": 24, "hidden_size": 1024, "intermediate_size": 4096}
    tower |= {"num_heads": 16, "image_size": 448, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}
    tower |= {"out_hidden_size": 4096, "projection_intermediate_size": 10240, "in_channels": 3, "attention_bias": True}
    tower |= {"attention_dropout": 0.0, "hidden_act": "silu", "swiglu_limit": 10.0, "rms_norm_eps": 1e-5}
    tokens = {name: _OUTER[name] for name in _OUTER if name not in ("model_type", "image_token_id")}
    outer = {"model_type": "glm5_next", "image_token_id": 154854, "tie_word_embeddings": False} | tokens
    config = glm5_next.Config.from_hf(outer | {"text_config": published()["glm_5_3_flash"], "vision_config": tower})
    assert config.text == fnmodels.preset("glm-5.3-flash") and config.image_token == 154854
    defaults = {"model_type": "glm5_next_vision", "out_hidden_size": 4096, "image_size": 448}
    assert config.vision == glm4v_vision.Config.from_hf(defaults)
    assert config.vision.head_dim == 64 and config.vision.rope_theta == 1e4
    stored = [name for one in stored_leaves(config) for name in storage.disk_names(one.stored)]
    assert len({name for name in stored if name.startswith("model.visual.")}) == 347


def test_frames_of_a_video_are_images() -> None:
    """Two frames of a patch are one image: between the tokens that begin and end a video too."""
    model, config, params = _reference("glm5_next"), _config("glm5_next"), _params("glm5_next")
    frames = torch.randn(2, 2, 3, 16, 24, generator=torch.Generator().manual_seed(5))  # two images of two frames
    images = [pair.transpose(0, 1).flatten(0, 1) for pair in frames]
    single = [[wrappers.merged_patches(frame, 4).view(24, 3, 2, 16)[:, :, 0] for frame in pair] for pair in frames]
    moving = torch.cat([torch.stack(pair, 2).flatten(1) for pair in single])
    feature = [IMAGE] * 6
    tokens = torch.tensor([[3, 56, 58, *feature, 57, 4, 58, *feature, 57, 5, 55, 7]])
    with torch.no_grad():
        given = {"pixel_values_videos": moving, "video_grid_thw": torch.tensor([[2, 4, 6]])}
        theirs = model(input_ids=tokens, use_cache=False, **given).logits
        found = image_features(params, images, config=config)
        places = glm5_next.image_places(tokens, IMAGE, torch.ones(found.values[0].shape[:2], dtype=torch.bool))
        inputs, masks, freqs = fnmodels.prepare(config.text, tokens)
        inputs = glm5_next.with_images(params, inputs, found.values[0], places, config=config)
        assert_close(fnmodels.forward(params["text"], inputs, masks, freqs, config=config.text), theirs)

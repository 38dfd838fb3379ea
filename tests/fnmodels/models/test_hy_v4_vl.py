"""Hy4 with images equals transformers with every parameter perturbed; packed documents equal each alone."""

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.hy_v4_vl.image_processing_pil_hy_v4_vl import smart_resize

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.image_text import image_features
from fnmodels.inputs.images import patch_rows, patches_of
from fnmodels.models.vision_language import hy_v4_vl
from tests.support import wrappers
from tests.support.cases import generic_params, off
from tests.support.oracle import assert_close, on_disk
from tests.variants.hy_v4 import IMAGES, YARN
from tests.variants.hy_v4 import variants as hy_v4
from tests.variants.llama import variants as llama

IMAGE, VIDEO = 60, 59  # the ids of their tokens
# 20 / 4: a table of 5 x 5 positions, which no image has
_VISION: dict[str, Any] = {"model_type": "hy_v4_vl_vision", "hidden_size": 24, "intermediate_size": 40}
_VISION |= {"num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4, "max_image_size": 20}
_VISION |= {"rms_norm_eps": 1e-2, "out_hidden_size": 32}
_TEXT = IMAGES | {"num_attention_heads": 4, "num_key_value_heads": 4}
_PLAIN = {"model_type": "hy_v4_vl", "image_token_id": IMAGE, "video_token_id": VIDEO, "tie_word_embeddings": False}
_PLAIN |= {"vision_config": _VISION, "text_config": _TEXT}
_LIGHT = _TEXT | {"attention_bias": True, "rope_parameters": YARN | {"mrope_section": [2, 2, 1]}}
_LIGHT |= {"qk_rope_head_dim": 10, "hc_mult": 2, "n_shared_experts": 1}
VARIANTS: dict[str, dict[str, Any]] = {
    "hy_v4_vl": _PLAIN,
    "hy_v4_vl_tied": _PLAIN
    | {"tie_word_embeddings": True, "text_config": _LIGHT, "vision_config": _VISION | {"hidden_act": "relu"}},
}
STRUCTURES = ("hy_v4_vl",)
DOCUMENTS: tuple[list[Any], ...] = ([2, (2, 3), 3], [5, (1, 4), 1, (2, 2), 3], [3], [(3, 2), 2])
every_variant = pytest.mark.parametrize("name", VARIANTS)


@functools.cache
def _config(name: str) -> hy_v4_vl.Config:
    return hy_v4_vl.Config.from_hf(VARIANTS[name])


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**copy.deepcopy(VARIANTS[name]))  # it removes types of the objects in it
    config._attn_implementation = "eager"
    config.text_config._experts_implementation = "eager"
    model = wrappers.perturbed(AutoModelForImageTextToText.from_config(config))
    return wrappers.with_generic_buffers(model)


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


def pixels(tokens: Tensor, images: list[Tensor]) -> dict[str, Tensor]:
    """What transformers takes beside the ids [1, S]: patches [n, 3 p p] row by row, and grids."""
    cells = [patches_of(image, 4) for image in images]
    found = {"image_grid_thw": torch.tensor([(1, *one.shape[:2]) for one in cells])}
    found["mm_token_type_ids"] = (tokens == IMAGE).long()
    return found | {"pixel_values": torch.cat([one.flatten(0, 1).flatten(1) for one in cells])}


def _ours(name: str, params: Any, **bug: bool) -> tuple[Tensor, Tensor]:
    return wrappers.qwen_logits(hy_v4_vl, _config(name), DOCUMENTS, IMAGE, params, **bug)


def _theirs(name: str) -> Tensor:
    out = []
    for text, images in zip(*wrappers.documents_with_grids(DOCUMENTS, IMAGE, 8, family=hy_v4_vl), strict=True):
        known = pixels(text[None], images) if images else {}
        out.append(_reference(name)(input_ids=text[None], use_cache=False, **known).logits[0])
    return torch.cat(out)


@every_variant
def test_packed_documents_with_images_equal_transformers_alone(name: str) -> None:
    with torch.no_grad():
        wanted = _theirs(name)
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
    _theirs(name).square().sum().backward()
    wrappers.assert_gradients(model, _config(name), params)


@every_variant
def test_files_are_read_and_written(name: str, tmp_path: Path) -> None:
    wrappers.assert_files(_reference(name), _config(name), tmp_path)
    wrappers.assert_text_alone(_config(name), tmp_path)


def test_cells_of_each_row_are_followed_by_a_newline() -> None:
    """Of images of several sizes in several rows of patches, by a loop over the positions."""
    config = _config("hy_v4_vl")
    _, images = wrappers.documents_with_grids(DOCUMENTS, IMAGE, 8)
    flat = [image for own in images for image in own]
    _, at, image_ids = patch_rows(flat, config.vision, length=50)
    wanted: list[list[list[int]]] = []
    for row, own in enumerate(image_ids):
        for image in range(1, int(own.max()) + 1):
            slots = {tuple(at[row, slot, :2].tolist()): slot for slot in range(50) if own[slot] == image}
            rows, columns = (1 + max(key[axis] for key in slots) for axis in (0, 1))
            for i in range(0, rows, 2):
                for j in range(0, columns, 2):
                    wanted.append([[row, slots[i + a, j + b]] for a in (0, 1) for b in (0, 1)])
                wanted.append([[-1, -1]] * 4)
    assert hy_v4_vl.cells(at, image_ids, 2).tolist() == wanted and image_ids.shape[0] > 1


def test_frames_of_a_video_are_images() -> None:
    """Each has positions of its own, and newlines; the tower and the text read them as images."""
    generator = torch.Generator().manual_seed(1)
    frames = [torch.randn(3, 16, 24, generator=generator) for _ in range(3)]
    config, params = _config("hy_v4_vl"), _params("hy_v4_vl")
    tokens = torch.tensor([[5, 6, *[VIDEO] * 24, 7, 8]])
    known = pixels(tokens, frames)
    grid = torch.tensor([[3, 4, 6]])
    with torch.no_grad():
        theirs = _reference("hy_v4_vl")(
            input_ids=tokens,
            pixel_values_videos=known["pixel_values"],
            video_grid_thw=grid,
            mm_token_type_ids=2 * (tokens == VIDEO).long(),
            use_cache=False,
        ).logits
        found = image_features(params, frames, config=config)
        places = hy_v4_vl.image_places(tokens, VIDEO, torch.ones(found.values[0].shape[:2], dtype=torch.bool))
        batch = fnmodels.prepare(config, tokens, places=places, grids=found.grids)
        inputs = hy_v4_vl.with_images(params, batch[0], found.values[0], places, config=config)
        ours = fnmodels.forward(params["text"], inputs, *batch[1:], config=config.text, kernel="math")
    assert found.grids.tolist() == [[1, 2, 4]] * 3
    assert_close(ours, theirs)


@pytest.mark.parametrize("size", [(20, 44), (700, 900), (40, 3000), (4000, 3900), (513, 511), (100, 9000)])
def test_pictures_have_the_size_that_transformers_gives_them(size: tuple[int, int]) -> None:
    config = hy_v4_vl.Config.from_hf({"model_type": "hy_v4_vl"})
    (picture,), text = hy_v4_vl.read_image(torch.zeros(3, *size, dtype=torch.uint8), {}, lambda _: "i", config=config)
    height, width = smart_resize(*size, factor=32, min_pixels=512 * 512, max_pixels=2048 * 2048)
    assert picture.shape == (3, height, width) and len(text) == (height // 32) * (width // 32 + 1)


def test_defaults_are_those_of_transformers() -> None:
    reference = AutoConfig.for_model("hy_v4_vl")
    whole = hy_v4_vl.Config.from_hf({"model_type": "hy_v4_vl"})
    assert whole == hy_v4_vl.Config.from_hf(reference.to_dict())
    assert whole.text.mrope_section == (12, 10, 10) and whole.text.latent_eps == whole.text.rms_norm_eps == 1e-5
    assert whole.text.rope_interleave  # neighbours rotate, as in transformers


def test_mtp_heads_that_the_config_counts_are_read(tmp_path: Path) -> None:
    config, params = _config("hy_v4_vl"), _params("hy_v4_vl")
    P.save_pretrained(tmp_path, config, params)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.mtp_layers.0.enorm.weight": torch.ones(32)}, file, {"format": "pt"})
    for part, wanted in ((None, params), ("text", params["text"])):
        read, loaded = P.load_pretrained(tmp_path, part=part, copy=True)
        flat = tree.flatten(wanted)
        assert all(torch.equal(leaf, flat[path]) for path, leaf in tree.flatten(loaded).items())
        assert read == (config if part is None else config.text)
    one = replace(config, text=replace(config.text, num_nextn_predict_layers=1))
    for count in (1, 2):
        values = _PLAIN | {"text_config": _TEXT | {"num_nextn_predict_layers": count}}
        assert hy_v4_vl.Config.from_hf(values) == one
    params = generic_params(one)
    P.save_pretrained(tmp_path / "head", one, params)
    read, loaded = P.load_pretrained(tmp_path / "head", part="text")
    assert read == one.text and loaded.keys() >= {"mtp"} and off(loaded, params["text"]) == 0
    read, loaded = P.load_pretrained(tmp_path / "head")
    assert read == one and off(loaded, params) == 0
    read, loaded = P.load_pretrained(tmp_path / "head", drop=("mtp",))
    assert read == config and "mtp" not in loaded["text"]


def test_another_text_is_refused() -> None:
    for values in (llama()["llama"], hy_v4()["hy_v4"]):
        with pytest.raises(UnsupportedError, match=f"type '{values['model_type']}' is not supported beside this tower"):
            hy_v4_vl.Config.from_hf(_PLAIN | {"text_config": values})


def test_what_is_not_read_is_refused() -> None:
    rope = IMAGES["rope_parameters"]
    for part, change, words in (
        ("vision", {"interpolate_mode": "bicubic"}, "'interpolate_mode' is \"bicubic\""),
        ("vision", {"num_key_value_heads": 2}, "'num_key_value_heads' is 2; only 4"),
        ("vision", {"out_hidden_size": 48}, "out_hidden_size 48 of vision_config is not the hidden_size 32"),
        ("text", {"rope_parameters": rope | {"mrope_section": [2, 1, 2]}}, r"\[2, 1, 2\] must add up to 4, half of"),
        ("text", {"rope_parameters": rope | {"mrope_interleaved": False}}, "'mrope_interleaved' is false"),
    ):
        values = _PLAIN | {f"{part}_config": _PLAIN[f"{part}_config"] | change}
        with pytest.raises((ConfigError, UnsupportedError), match=words):
            hy_v4_vl.Config.from_hf(values)

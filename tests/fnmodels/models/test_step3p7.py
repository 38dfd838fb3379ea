"""Step 3.7 with images equals transformers with every parameter perturbed; packed documents equal each alone."""

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
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.step3p7.image_processing_step3p7 import Step3p7ImageProcessor

import params as P
from fnmodels import tree
from fnmodels.image_text import image_features
from fnmodels.inputs.image_sizes import whole_and_crops
from fnmodels.inputs.images import resize
from fnmodels.models.vision import step3p5_vision
from fnmodels.models.vision_language import step3p7
from tests.support import wrappers
from tests.support.cases import generic_params, off
from tests.support.oracle import assert_close, on_disk
from tests.variants.step3p5 import TINY

IMAGE = 60  # the id of image tokens
# a table of 8 x 8 positions, which is resampled to other images
_VISION: dict[str, Any] = {"model_type": "step3p5_vision", "hidden_size": 32, "mlp_ratio": 1.25, "image_size": 32}
_VISION |= {"num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4, "layer_norm_eps": 1e-2}
_VISION |= {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}, "layer_scale_init_value": 0.2}
_PLAIN = {"model_type": "step3p7", "image_token_id": IMAGE, "vision_config": _VISION, "text_config": TINY}
VARIANTS = {
    "step3p7": _PLAIN,
    "step3p7_tied": _PLAIN | {"projector_bias": True, "tie_word_embeddings": True, "vision_config": _VISION},
}
STRUCTURES = ("step3p7",)
DOCUMENTS: tuple[list[Any], ...] = ([2, (2, 3), 3], [5, (1, 4), 1, (3, 2), 4], [3], [(2, 2), 2])
every_variant = pytest.mark.parametrize("name", VARIANTS)


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**copy.deepcopy(VARIANTS[name]))  # it removes types of the objects in it
    config._attn_implementation = "eager"
    config.text_config._experts_implementation = "eager"
    model = wrappers.perturbed(AutoModelForImageTextToText.from_config(config))
    return wrappers.with_generic_buffers(model)


@functools.cache
def _config(name: str) -> step3p7.Config:
    return step3p7.Config.from_hf(VARIANTS[name])


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


def pixels(images: list[Tensor], name: str = "step3p7") -> dict[str, Any]:
    """Features of pictures of any sizes: a call of transformers' model takes those of one size."""
    found = [_reference(name).model.get_image_features(image[None]).pooler_output[0] for image in images]
    return {"mm_encoder_outputs": {"image": BaseModelOutputWithPooling(pooler_output=found)}}


def _ours(name: str, params: Any, **bug: bool) -> tuple[Tensor, Tensor]:
    return wrappers.cell_logits(step3p7, _config(name), DOCUMENTS, IMAGE, params, length=170, **bug)


def _theirs(name: str) -> Tensor:
    return wrappers.alone(_reference(name), DOCUMENTS, IMAGE, 16, pixels=functools.partial(pixels, name=name))


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


def test_crops_and_the_whole_picture_are_in_the_order_of_transformers() -> None:
    """The features of crops stand before those of the whole picture, whose sizes differ."""
    generator = torch.Generator().manual_seed(0)
    crops, whole = torch.randn(5, 3, 16, 16, generator=generator), torch.randn(2, 3, 32, 32, generator=generator)
    with torch.no_grad():
        out = _reference("step3p7").model.get_image_features(whole, crops, [2, 3]).pooler_output
        images = [*crops[:2], whole[0], *crops[2:], whole[1]]
        found = image_features(_params("step3p7"), images, config=_config("step3p7"))
    assert_close(found.values[0][0], torch.cat(list(out)))
    assert found.grids.tolist() == [[1, 1, 1], [1, 1, 1], [1, 2, 2], [1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 2, 2]]


@pytest.mark.parametrize("size", [(5, 8), (1, 1), (6, 3)])
def test_convolutions_of_grids_without_whole_cells(size: tuple[int, int]) -> None:
    """As `conv2d` with zeros around the image, the second image of a row too."""
    weights = _params("step3p7")["vision"]
    rows, columns = size
    at = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
    at = torch.cat((at, torch.tensor(size).expand_as(at)), -1)
    positions, segment_ids = torch.cat((at, at))[None], torch.arange(1, 3).repeat_interleave(len(at))[None]
    x = torch.randn(1, 2 * len(at), 32, generator=torch.Generator().manual_seed(0))
    found = step3p5_vision.downsampled(weights, x, step3p5_vision.windows(positions, segment_ids))
    grid = x.unflatten(1, (2, rows, columns))[0].permute(0, 3, 1, 2)
    for name in ("conv", "last_conv"):
        grid = torch.conv2d(grid, weights[name], weights[f"{name}_bias"], stride=2, padding=1)
    assert_close(found[0], grid.flatten(2).mT.flatten(0, 1))


def test_published_files_are_read() -> None:
    """They have other names in the tower's object, and switches that say what is so of every such tower."""
    names = {"hidden_size": "width", "num_hidden_layers": "layers", "num_attention_heads": "heads"}
    names |= {"layer_scale_init_value": "ls_init_value"}
    tower: dict[str, Any] = {names.get(name, name): value for name, value in _VISION.items()}
    tower |= {
        "model_type": "perception_encoder",
        "use_cls_token": False,
        "use_ln_post": False,
        "pool_type": "none",
        "output_dim": None,
    }
    outer = _PLAIN | {"understand_projector_stride": 2, "image_token_len": 169, "patch_token_len": 81}
    assert step3p7.Config.from_hf(outer | {"vision_config": tower}) == _config("step3p7")
    for change, words in (({"use_cls_token": True}, "'use_cls_token' is true"), ({"intermediate_size": 7}, "only 40")):
        with pytest.raises(ValueError, match=words):
            step3p7.Config.from_hf(outer | {"vision_config": tower | change})
    with pytest.raises(ValueError, match="'understand_projector_stride' is 1"):
        step3p7.Config.from_hf(outer | {"understand_projector_stride": 1})
    with pytest.raises(ValueError, match="a multiple of 4, for rows and columns"):
        step3p7.Config.from_hf(outer | {"vision_config": tower | {"heads": 16}})


def test_files_with_mtp_layers_are_read_without_them(tmp_path: Path) -> None:
    P.save_pretrained(tmp_path, _config("step3p7"), _params("step3p7"))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file) | {"model.layers.3.eh_proj.weight": torch.zeros(4, 4)}
    save_file(tensors, file, metadata={"format": "pt"})
    for part, wanted in ((None, _params("step3p7")), ("text", _params("step3p7")["text"])):
        _, params = P.load_pretrained(tmp_path, part=part, copy=True)
        flat = tree.flatten(wanted)
        assert all(torch.equal(leaf, flat[path]) for path, leaf in tree.flatten(params).items())


_SIZES = [(20, 44), (64, 64), (40, 90), (12, 300), (128, 31), (200, 210), (50, 64), (33, 400), (900, 901), (7, 20)]


@pytest.mark.parametrize("size", _SIZES)
def test_pictures_are_cut_as_by_transformers(size: tuple[int, int]) -> None:
    """Resized by `fnmodels.inputs.images.resize`, which is torchvision's: tests/fnmodels/inputs/test_images.py."""
    process: Any = Step3p7ImageProcessor(max_image_size=512)
    process.resize = lambda images, to, resample: torch.stack(
        [resize(one, (to.height, to.width), how="bilinear") for one in images]
    )
    process.pad = lambda images, pad_size: [
        torch.nn.functional.pad(one, (0, pad_size.width - one.shape[2], 0, pad_size.height - one.shape[1]))
        for one in images
    ]
    image = (torch.rand(3, *size, generator=torch.Generator().manual_seed(0)) * 255).byte()
    theirs, patches, wide, high = process._get_image_patches(image, 64, 48, 2)
    whole, crops, columns = whole_and_crops(image, 64, 48, most=512)
    assert torch.equal(whole, theirs) and (len(crops), columns) == (len(patches), wide) == (wide * high, wide)
    for crop, patch in zip(crops, patches, strict=True):
        assert torch.equal(crop, resize(patch, (48, 48), how="bilinear"))


def test_pictures_that_shrink_to_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="An image of 32 x 20000 pixels is too narrow"):
        whole_and_crops(torch.zeros(3, 32, 20000, dtype=torch.uint8), 64, 48, most=512)


def test_the_text_has_the_mtp_heads_of_the_files(tmp_path: Path) -> None:
    """Alone and in the full model; they are saved again, or left out."""
    plain = _config("step3p7")
    config = replace(plain, text=replace(plain.text, num_nextn_predict_layers=2))
    params = generic_params(config)
    P.save_pretrained(tmp_path, config, params)
    assert step3p7.Config.from_hf(config.to_hf()) == config
    names = load_file(tmp_path / "model.safetensors").keys()
    assert {"model.layers.3.eh_proj.weight", "model.layers.4.transformer.shared_head.output.weight"} <= names
    text, found = P.load_pretrained(tmp_path, part="text")
    assert text == config.text and found.keys() >= {"mtp"} and off(found, params["text"]) == 0
    text, found = P.load_pretrained(tmp_path, part="text", drop=("mtp",))
    assert text == plain.text and "mtp" not in found
    whole, found = P.load_pretrained(tmp_path)
    assert whole == config and off(found, params) == 0
    P.save_pretrained(tmp_path / "kept", whole, found)
    assert load_file(tmp_path / "kept" / "model.safetensors").keys() == names
    whole, found = P.load_pretrained(tmp_path, drop=("mtp",))
    assert whole == plain and "mtp" not in found["text"] and off(found["vision"], params["vision"]) == 0
    P.save_pretrained(tmp_path / "again", whole, found)
    (tmp_path / "again" / "config.json").write_bytes((tmp_path / "config.json").read_bytes())
    text, found = P.load_pretrained(tmp_path / "again", part="text")  # which counts heads that its files lack
    assert text == plain.text and "mtp" not in found
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.4.enorm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(P.MismatchError, match=r"model\.layers\.4\.enorm\.weight: missing"):
        P.load_pretrained(tmp_path, part="text")

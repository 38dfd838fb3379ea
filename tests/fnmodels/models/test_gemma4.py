"""Gemma 4 with images equals transformers with every parameter perturbed; packed documents equal each alone.

transformers looks spans up by the index in the document, so each document alone is the oracle.
"""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.inputs.images import patches_of
from fnmodels.models.vision_language import gemma4
from tests.support import wrappers
from tests.support.cases import generic
from tests.support.oracle import assert_close, on_disk
from tests.variants.gemma4 import TINY, variants

IMAGE = 60  # the id of image tokens
_VISION: dict[str, Any] = {"model_type": "gemma4_vision", "hidden_size": 32, "intermediate_size": 40, "patch_size": 4}
_VISION |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
_VISION |= {"pooling_kernel_size": 2, "position_embedding_size": 12, "rms_norm_eps": 1e-2}
VALUES = {"model_type": "gemma4", "image_token_id": IMAGE, "boi_token_id": 57, "eoi_token_id": 56}
VALUES |= {"video_token_id": 59, "audio_token_id": 58, "audio_config": None, "vision_config": _VISION}
_E = variants()["gemma4_text_e"] | {"vocab_size_per_layer_input": 61, "pad_token_id": 3}
VARIANTS = {  # as 31B and as E2B
    "gemma4": VALUES
    | {"vision_config": _VISION | {"standardize": True}}
    | {"text_config": TINY | {"use_bidirectional_attention": "vision", "sliding_window": 5}},
    "gemma4_e": VALUES | {"text_config": _E, "vision_config": _VISION | {"use_clipped_linears": True}},
}
_UNIFIED: dict[str, Any] = {"model_type": "gemma4_unified_vision", "patch_size": 4, "pooling_kernel_size": 2}
_UNIFIED |= {"mm_embed_dim": 20, "output_proj_dims": 20, "mm_posemb_size": 7, "rms_norm_eps": 1e-2}
VARIANTS["gemma4_unified"] = (
    VALUES
    | {"model_type": "gemma4_unified", "vision_config": _UNIFIED}
    | {"text_config": variants()["gemma4_unified_text"] | {"sliding_window": 5}}
)
# Per document: numbers of text tokens, and between them the (rows, columns) of images in cells of 2 x 2 patches.
DOCUMENTS: tuple[list[Any], ...] = ([2, (2, 3), 3], [5, (1, 4), 1, (3, 2), 4], [3], [(2, 2), 2])


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    config._attn_implementation = "eager"
    kind = "Gemma4Unified" if name == "gemma4_unified" else "Gemma4"
    model = wrappers.perturbed(getattr(transformers, f"{kind}ForConditionalGeneration")(config))
    for path, module in model.named_modules():
        if path.endswith(("embed_tokens", "embed_tokens_per_layer")):
            module.padding_idx = None  # which would leave the row of padding without a gradient
    for path, buffer in model.named_buffers():
        if "std_" in path or "layer_scalar" in path:
            buffer.copy_(generic(path, buffer))
        if path.endswith(("put_min", "put_max")):  # limits that a part of the values exceeds
            buffer.fill_((-0.7 if path.endswith("min") else 0.9) * (1 + len(path) % 3 / 10))
    return model


def _config(name: str) -> gemma4.Config:
    return gemma4.Config.from_hf(VARIANTS[name])


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


def _ours(name: str, params: Any, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """(logits [2, 36, V], segment ids), two documents in each row; planted bug: the masks of text."""
    config = _config(name)
    texts, images = wrappers.documents_with_grids(DOCUMENTS, IMAGE, 8)
    tokens, segment_ids = wrappers.rows_of((texts[:2], texts[2:]), 36)
    flat = [image for own in images for image in own]
    patches, at, image_ids = fnmodels.inputs.patch_rows(flat, config.vision, length=50)
    batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
    x = fnmodels.forward(params["vision"], *batch, config=config.vision)
    features = gemma4.project(params, x, gemma4.cells(at, image_ids, config.vision.pooled), config=config)
    own = fnmodels.positions_from_segments(segment_ids)
    inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=own, segment_ids=segment_ids)
    places = gemma4.image_places(tokens, IMAGE, torch.ones(features.shape[:2], dtype=torch.bool))
    inputs = gemma4.with_images(params, inputs, features, places, config=config)
    masks = masks if causal else gemma4.image_masks(config, own, segment_ids, places)
    logits: Tensor = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text, kernel="math")
    return logits, segment_ids


def masks(model: Any, types: Tensor) -> dict[str, Any]:
    """{"attention_mask": that of generation} for 12B: transformers' forward has others, also in full layers."""
    if model.config.model_type == "gemma4":
        return {}
    x, at = torch.zeros(*types.shape, model.config.text_config.hidden_size), torch.arange(types.shape[1])[None]
    known = {"attention_mask": None, "cache": None, "position_ids": at, "mm_token_type_ids": types}
    return {"attention_mask": model.create_masks_for_generate(model.config, x, **known)}


def _theirs(model: Any) -> Tensor:
    """[tokens, V]: every document alone, its images padded to as many patches as the largest has."""
    out = []
    for text, images in zip(*wrappers.documents_with_grids(DOCUMENTS, IMAGE, 8), strict=True):
        given: dict[str, Tensor] = {}
        if images:
            tower = model.config.vision_config
            patch = getattr(tower, "model_patch_size", tower.patch_size)
            cells = [patches_of(image, patch, channels_last=True) for image in images]
            most = max(one.shape[0] * one.shape[1] for one in cells)
            pixels, places = torch.zeros(len(cells), most, 3 * patch**2), torch.full((len(cells), most, 2), -1)
            for i, one in enumerate(cells):
                grid = torch.cartesian_prod(torch.arange(one.shape[0]), torch.arange(one.shape[1]))
                pixels[i, : len(grid)], places[i, : len(grid)] = one.flatten(0, 1), grid.flip(-1)
            given = {"pixel_values": pixels, "image_position_ids": places}
        types = (text == IMAGE).long()[None]
        given |= {"mm_token_type_ids": types} | masks(model, types)
        out.append(model(input_ids=text[None], **given).logits[0])
    return torch.cat(out)


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_documents_with_images_equal_transformers_alone(name: str) -> None:
    with torch.no_grad():
        wanted = _theirs(_reference(name))
        logits, segment_ids = _ours(name, _params(name))
        assert_close(logits[segment_ids > 0], wanted)
        if _config(name).bidirectional:
            assert (_ours(name, _params(name), causal=True)[0][segment_ids > 0] - wanted).abs().max() > 1e-2
        if getattr(_config(name).vision, "clipped", False):
            free = {
                path: 1e9 * leaf if "_limits." in path else leaf for path, leaf in tree.flatten(_params(name)).items()
            }
            assert (_ours(name, tree.unflatten(free))[0][segment_ids > 0] - wanted).abs().max() > 1e-2


def test_fresh_limits_clip_nothing() -> None:
    limits = P.init(_config("gemma4_e"), seed=0)["vision"]["layers"][0]["mlp"]["up_limits"]
    assert {name: float(value) for name, value in limits.items()} == {
        "input_min": -math.inf,
        "input_max": math.inf,
        "output_min": -math.inf,
        "output_max": math.inf,
    }


@pytest.mark.parametrize("name", ["gemma4_e", "gemma4_unified"])
def test_gradients_equal_transformers(name: str) -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params(name))
    logits, segment_ids = _ours(name, params)
    logits[segment_ids > 0].square().sum().backward()
    model = _reference(name)
    model.zero_grad()
    _theirs(model).square().sum().backward()
    wrappers.assert_gradients(model, _config(name), params)


@pytest.mark.parametrize("name", VARIANTS)
def test_files_are_read_and_written(name: str, tmp_path: Path) -> None:
    wrappers.assert_files(_reference(name), _config(name), tmp_path)
    wrappers.assert_text_alone(_config(name), tmp_path)


def test_an_audio_tower_is_left_out_by_name_alone(tmp_path: Path) -> None:
    config = _config("gemma4")
    P.save_pretrained(tmp_path, config, P.init(config, 0))
    file = tmp_path / "model.safetensors"
    more = {f"model.{name}.weight": torch.ones(2) for name in ("audio_tower.layers.0.norm", "embed_audio.proj")}
    save_file(load_file(file) | more, file)
    with pytest.raises(P.UnsupportedError) as error:
        P.load_pretrained(tmp_path)
    assert "has a part for audio, 2 tensors such as model.audio_tower.layers.0.norm.weight" in str(error.value)
    assert "drop=('audio',) loads the model without it" in str(error.value)
    found, params = P.load_pretrained(tmp_path, drop=("audio",))
    assert found == config and tree.flatten(params).keys() == tree.flatten(gemma4.spec(config)).keys()
    for part in ("text", "vision"):
        assert P.load_pretrained(tmp_path, part=part)[0] == getattr(config, part)
    with pytest.raises(ValueError, match="drop names 'sound'; what can be left out of this model is 'audio'"):
        P.load_pretrained(tmp_path, drop=("sound",))


def test_errors_name_what_does_not_fit() -> None:
    values = VARIANTS["gemma4"]
    with pytest.raises(ValueError, match="'attention_bias' is true; only false"):
        gemma4.Config.from_hf(values | {"vision_config": _VISION | {"attention_bias": True}})
    with pytest.raises(ValueError, match=r"has no 'vision_config': its text is read by fnmodels.models.decoder.gemma4"):
        gemma4.Config.from_hf(values | {"vision_config": None})
    with pytest.raises(ValueError, match="The heads are 18 wide, but must be a multiple of 4"):
        gemma4.Config.from_hf(values | {"vision_config": _VISION | {"hidden_size": 36, "head_dim": 18}})

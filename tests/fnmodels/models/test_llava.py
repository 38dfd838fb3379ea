"""LLaVA equals transformers with every parameter perturbed; packed documents with images equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaForCausalLM

import fnmodels
import params as P
from fnmodels import tree
from fnmodels.inputs.image_places import place
from fnmodels.models.vision_language import llava
from fnmodels.models.vision_language.common import vision_language
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

IMAGE = 60  # the id of image tokens
_VISION = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
_VISION |= {"num_attention_heads": 4, "image_size": 18, "patch_size": 6, "layer_norm_eps": 1e-2}
_TEXT = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT |= {"num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 64, "rms_norm_eps": 7e-3}
_OUTER = {"model_type": "llava", "image_token_index": IMAGE, "image_seq_length": 9, "vision_config": _VISION}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": _OUTER | {"text_config": _TEXT | {"model_type": "llama"}},
    "qwen2": _OUTER
    | {"text_config": _TEXT | {"model_type": "qwen2", "head_dim": 6, "tie_word_embeddings": False}}
    | {"vision_feature_layer": 1, "multimodal_projector_bias": False},
}
VARIANTS["vipllava"] = {name: value for name, value in _OUTER.items() if name != "image_seq_length"} | {
    "model_type": "vipllava",
    "text_config": _TEXT | {"model_type": "llama"},
    "vision_feature_layer": [-2, 1, -1],
    "projector_layernorm_eps": 2e-2,
}
VARIANTS["video_llava"] = VARIANTS["llama"] | {"model_type": "video_llava", "video_token_index": 59}
STRUCTURES = ("llama", "qwen2")  # for the tests of all readers of images
# Per document, the numbers of text tokens before, between and after its images.
DOCUMENTS = ((2, 3), (5, 1, 4), (3,), (0, 2))


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    config._attn_implementation = "eager"
    return wrappers.perturbed(AutoModelForImageTextToText.from_config(config))


def _config(name: str) -> llava.Config:
    return llava.Config.from_hf(VARIANTS[name])


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


def _documents() -> tuple[list[Tensor], list[list[Tensor]]]:
    """(tokens of each document, its images [3, 18, 18])."""
    generator = torch.Generator().manual_seed(0)
    texts, images = [], []
    for lengths in DOCUMENTS:
        runs = [torch.randint(1, IMAGE, (n,), generator=generator) for n in lengths]
        parts = [part for run in runs for part in (run, torch.full((9,), IMAGE))][:-1]
        texts.append(torch.cat(parts))
        images.append([torch.randn(3, 18, 18, generator=generator) for _ in runs[1:]])
    return texts, images


def _batch() -> tuple[Tensor, Tensor, list[Tensor]]:
    """(tokens [2, 48], segment ids, images in the order of their tokens): two documents in each row, and padding."""
    texts, images = _documents()
    tokens, segment_ids = wrappers.rows_of((texts[:2], texts[2:]), 48)
    return tokens, segment_ids, [image for own in images for image in own]


def _ours(name: str, params: Any, *, shift: int = 0) -> tuple[Tensor, Tensor]:
    """(logits [2, 48, V], segment ids) of the batch; shift: of the slot of each feature, a planted bug."""
    config = _config(name)
    tokens, segment_ids, images = _batch()
    patches, positions, image_ids = fnmodels.inputs.patch_rows(images, config.vision, length=25)  # two images in a row
    seen, tower = llava.tower(params, config)
    batch, names = fnmodels.prepare(tower, patches, positions=positions, segment_ids=image_ids), llava.taps(config)
    x = fnmodels.hidden(seen, *batch, config=tower, taps=names)
    x = vision_language.of_layers(*x, config) if names else x
    places = llava.image_places(tokens, config.image_token, (image_ids > 0) & (positions[..., 0] >= 0))
    places[..., 1] += shift * (places[..., 1] > 1)
    own = fnmodels.positions_from_segments(segment_ids)
    inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens, positions=own, segment_ids=segment_ids)
    inputs = llava.with_images(
        params, inputs, llava.project(params, x, norm_eps=config.norm_eps), places, config=config
    )
    logits: Tensor = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text, kernel="math")
    return logits, segment_ids


def _theirs(model: Any) -> Tensor:
    """[tokens, V]: every document alone, one after the other."""
    out = []
    for text, images in zip(*_documents(), strict=True):
        pixels = {"pixel_values": torch.stack(images)} if images else {}
        out.append(model(input_ids=text[None], **pixels).logits[0])
    return torch.cat(out)


@pytest.mark.parametrize("name", VARIANTS)
def test_packed_documents_with_images_equal_transformers_alone(name: str) -> None:
    with torch.no_grad():
        wanted = _theirs(_reference(name))
        logits, segment_ids = _ours(name, _params(name))
        assert_close(logits[segment_ids > 0], wanted)
        wrong = _ours(name, _params(name), shift=-1)[0][segment_ids > 0]
    assert (wrong - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("name", ["llama", "vipllava"])
def test_gradients_equal_transformers(name: str) -> None:
    """Of every parameter; 0 for those of the tower behind its feature layer."""
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


def test_frames_of_videos_equal_transformers() -> None:
    """A document with an image and a video of two frames, whose class tokens are features."""
    config, params, draw = _config("video_llava"), _params("video_llava"), torch.Generator().manual_seed(1)
    image, frames = torch.randn(1, 3, 18, 18, generator=draw), torch.randn(2, 3, 18, 18, generator=draw)
    tokens = torch.tensor([[3, *[IMAGE] * 9, 4, *[59] * 20, 5, 6]])
    inputs, masks, freqs_cis = fnmodels.prepare(config.text, tokens)
    for tower, pictures, token in ((llava.tower, image, IMAGE), (llava.video_tower, frames, 59)):
        patches, at, ids = fnmodels.inputs.patch_rows(list(pictures), config.vision, length=25)
        weights, cut = tower(params, config)
        x = fnmodels.hidden(weights, *fnmodels.prepare(cut, patches, positions=at, segment_ids=ids), config=cut)
        read = (ids > 0) & ((at[..., 0] >= 0) | (token == 59))
        places = llava.image_places(tokens, token, read)
        inputs = llava.with_images(params, inputs, llava.project(params, x), places, config=config)
    with torch.no_grad():
        ours = fnmodels.forward(params["text"], inputs, masks, freqs_cis, config=config.text, kernel="math")
        pixels = {"pixel_values": image, "pixel_values_videos": frames[None]}
        assert_close(ours, _reference("video_llava")(input_ids=tokens, **pixels).logits)


def test_one_part_is_loaded_alone(tmp_path: Path) -> None:
    """The text part reads no tensor of the others, and is a model of its own that transformers loads."""
    _reference("llama").save_pretrained(tmp_path / "whole")
    reports: list[Any] = []
    config, text = P.load_pretrained(tmp_path / "whole", part="text", report=reports.append)
    whole = tree.flatten(_params("llama")["text"])
    flat = tree.flatten(text)
    assert config == _config("llama").text
    assert flat.keys() == whole.keys()
    assert all(torch.equal(leaf, whole[path]) for path, leaf in flat.items())
    assert reports[0].mapped == sum(leaf.nbytes for leaf in whole.values())
    P.save_pretrained(tmp_path / "text", config, text)
    again, told = LlamaForCausalLM.from_pretrained(tmp_path / "text", output_loading_info=True)
    assert not any(told.values()), told
    tokens = torch.arange(1, 12)[None]
    with torch.no_grad():
        logits = fnmodels.forward(text, *fnmodels.prepare(config, tokens), config=config)
        assert_close(logits, again(tokens).logits)
    same, _ = P.load_pretrained(tmp_path / "text", part="text")
    assert same == config
    with pytest.raises(ValueError, match="the model has no part 'vision'; it has text"):
        P.load_pretrained(tmp_path / "text", part="vision")
    with pytest.raises(ValueError, match="the model has no part 'audio'; it has text, vision"):
        P.load_pretrained(tmp_path / "whole", part="audio")


def test_errors_name_what_does_not_fit() -> None:
    tokens = torch.tensor([[1, IMAGE, IMAGE]])
    with pytest.raises(ValueError, match=r"2 image tokens \(id 60\), but the images have 1 patches"):
        llava.image_places(tokens, IMAGE, torch.tensor([[True, False]]))
    with pytest.raises(ValueError, match=r"places must be int64 \[1, 3, 2\], .* not int64 \[1, 3\]"):
        place(torch.zeros(1, 3, 4), torch.zeros(1, 2, 4), tokens)
    with pytest.raises(ValueError, match="features have width 5, the text's embeddings 4"):
        place(torch.zeros(1, 3, 4), torch.zeros(1, 2, 5), torch.zeros(1, 3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="'vision_feature_layer' is -5, but the tower has 3 layers"):
        llava.Config.from_hf(VARIANTS["llama"] | {"vision_feature_layer": -5})
    with pytest.raises(ValueError, match=r"'vision_feature_select_strategy' is .*full"):
        llava.Config.from_hf(VARIANTS["llama"] | {"vision_feature_select_strategy": "full"})

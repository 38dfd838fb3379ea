"""PaliGemma equals transformers with every parameter perturbed; packed documents equal each alone.

Without token types transformers' kernels disagree with each other, so documents have them.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PaliGemmaForConditionalGeneration

import fnmodels
from fnmodels import tree
from fnmodels.inputs.image_places import cells
from fnmodels.models.vision_language import paligemma
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

IMAGE = 60  # the id of image tokens
_VISION: dict[str, Any] = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 40}
_VISION |= {"num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 12, "patch_size": 4, "layer_norm_eps": 1e-2}
_VISION |= {"vision_use_head": False}
_TEXT: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "vocab_size": 61, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 7e-3}
_TEXT |= {"max_position_embeddings": 64}
_GEMMA2 = {"model_type": "gemma2", "sliding_window": 6, "query_pre_attn_scalar": 12, "attn_logit_softcapping": 4.0}
_GEMMA2 |= {"final_logit_softcapping": 5.0}
_OUTER = {"model_type": "paligemma", "image_token_index": IMAGE, "vision_config": _VISION, "projection_dim": 24}
VARIANTS: dict[str, dict[str, Any]] = {
    "paligemma": _OUTER | {"text_config": _TEXT | {"model_type": "gemma"}},
    "paligemma2": _OUTER | {"text_config": _TEXT | _GEMMA2, "tie_word_embeddings": True},
}
every_variant = pytest.mark.parametrize("name", VARIANTS)
# Per document the images of 9 tokens, the text tokens of the prompt, and those of the answer, longer than the window.
DOCUMENTS = ((1, 3, 8), (2, 1, 2), (0, 3, 2), (1, 2, 0))


@functools.cache
def _config(name: str) -> paligemma.Config:
    return paligemma.Config.from_hf(VARIANTS[name])


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**VARIANTS[name])
    config._attn_implementation = "eager"
    return wrappers.perturbed(PaliGemmaForConditionalGeneration(config))


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


@functools.cache
def _documents() -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """(tokens of each document, their types, its images [3, 12, 12])."""
    generator = torch.Generator().manual_seed(0)
    texts, types, images = [], [], []
    for count, prompt, answer in DOCUMENTS:
        words = torch.randint(1, 57, (prompt + answer,), generator=generator)
        texts.append(torch.cat((torch.full((9 * count,), IMAGE), words)))
        types.append(torch.tensor([0] * (9 * count + prompt) + [1] * answer))
        images.append([torch.randn(3, 12, 12, generator=generator) for _ in range(count)])
    return texts, types, images


def _ours(name: str, params: Any, *, bug: str = "") -> tuple[Tensor, Tensor]:
    """(logits [2, 42, V], segment ids), two documents in each row; bug: all is "prompt", or all is "answer"."""
    config, (texts, types, images) = _config(name), _documents()
    tokens, segment_ids = wrappers.rows_of((texts[:2], texts[2:]), 42)
    token_types, _ = wrappers.rows_of((types[:2], types[2:]), 42)
    token_types = {"prompt": 0 * token_types, "answer": token_types**0}.get(bug, token_types)
    flat = [image for own in images for image in own]
    patches, at, image_ids = fnmodels.inputs.patch_rows(flat, config.vision, length=20)
    batch = fnmodels.prepare(config.vision, patches, positions=at, segment_ids=image_ids)
    x = fnmodels.forward(params["vision"], *batch, config=config.vision)
    features = paligemma.project(params, x, cells(at, image_ids, 1))
    where = {"positions": fnmodels.positions_from_segments(segment_ids), "segment_ids": segment_ids}
    places = paligemma.image_places(tokens, IMAGE, torch.ones(features.shape[:2], dtype=torch.bool))
    prepared = fnmodels.prepare(config, tokens, places=places, token_types=token_types, **where)
    inputs = paligemma.with_images(params, prepared[0], features, places, config=config)
    logits: Tensor = fnmodels.forward(params["text"], inputs, *prepared[1:], config=config.text, kernel="math")
    return logits, segment_ids


def _theirs(model: Any) -> Tensor:
    """[tokens, V]: every document alone, one after the other."""
    out = []
    for text, types, images in zip(*_documents(), strict=True):
        pixels = {"pixel_values": torch.stack(images)} if images else {}
        out.append(model(input_ids=text[None], token_type_ids=types[None], use_cache=False, **pixels).logits[0])
    return torch.cat(out)


@every_variant
def test_packed_documents_with_images_equal_transformers_alone(name: str) -> None:
    with torch.no_grad():
        wanted = _theirs(_reference(name))
        logits, segment_ids = _ours(name, _params(name))
        assert_close(logits[segment_ids > 0], wanted)
        for bug in ("prompt", "answer"):
            assert (_ours(name, _params(name), bug=bug)[0][segment_ids > 0] - wanted).abs().max() > 1e-2


@every_variant
def test_gradients_equal_transformers(name: str) -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params(name))
    logits, segment_ids = _ours(name, params)
    logits[segment_ids > 0].square().sum().backward()
    model = _reference(name)
    model.zero_grad()
    _theirs(model).square().sum().backward()
    wrappers.assert_gradients(model, _config(name), params)


@every_variant
def test_files_are_read_and_written(name: str, tmp_path: Path) -> None:
    wrappers.assert_files(_reference(name), _config(name), tmp_path)
    wrappers.assert_text_alone(_config(name), tmp_path)


def test_a_prompt_has_to_be_told_from_its_answer() -> None:
    config, places = _config("paligemma"), torch.full((1, 3, 2), -1)
    with pytest.raises(ValueError, match=r"The prompt of paligemma sees all of itself .*: pass token_types \[B, S\]"):
        fnmodels.prepare(config, torch.ones(1, 3, dtype=torch.int64), places=places)
    with pytest.raises(ValueError, match="token_types must be"):
        fnmodels.prepare(
            config, torch.ones(1, 3, dtype=torch.int64), places=places, token_types=torch.ones(1, 2).long()
        )


def test_what_transformers_adds_to_the_text_is_read() -> None:
    text = VARIANTS["paligemma2"]["text_config"] | {"use_bidirectional_attention": True, "num_image_tokens": 9}
    assert paligemma.Config.from_hf(VARIANTS["paligemma2"] | {"text_config": text}) == _config("paligemma2")


def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="projection_dim is 20; features replace embeddings, of 24 elements"):
        paligemma.Config.from_hf(VARIANTS["paligemma"] | {"projection_dim": 20})
    with pytest.raises(ValueError, match="'size' is 10, and the tower reads squares of 12 pixels"):
        paligemma.read_image(torch.zeros(3, 9, 9), {"size": {"height": 10}}, str, config=_config("paligemma"))

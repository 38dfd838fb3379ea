"""BLIP-2 equals transformers with every parameter perturbed; packed documents with images equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

import fnmodels
from fnmodels import tree
from fnmodels.image_text import image_grid
from fnmodels.models.vision_language import blip_2
from tests.support import wrappers
from tests.support.oracle import assert_close, on_disk

IMAGE = 60  # the id of image tokens
QUERIES = 9
_VISION: dict[str, Any] = {"model_type": "blip_2_vision_model", "hidden_size": 16, "intermediate_size": 20}
_VISION |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 12, "patch_size": 4}
_VISION |= {"layer_norm_eps": 1e-2}
_QFORMER: dict[str, Any] = {"model_type": "blip_2_qformer", "hidden_size": 12, "num_hidden_layers": 2}
_QFORMER |= {"num_attention_heads": 2, "intermediate_size": 20, "encoder_hidden_size": 16, "layer_norm_eps": 1e-2}
_QFORMER |= {"cross_attention_frequency": 2}
_TEXT: dict[str, Any] = {"model_type": "opt", "hidden_size": 24, "ffn_dim": 40, "num_hidden_layers": 2}
_TEXT |= {"num_attention_heads": 4, "word_embed_proj_dim": 24, "vocab_size": 61, "max_position_embeddings": 128}
_TEXT |= {"dropout": 0.0, "pad_token_id": 0}
VALUES: dict[str, Any] = {"model_type": "blip-2", "image_token_index": IMAGE, "num_query_tokens": QUERIES}
VALUES |= {"vision_config": _VISION, "qformer_config": _QFORMER, "text_config": _TEXT}
VALUES |= {"architectures": ["Blip2ForConditionalGeneration"]}
CONFIG = blip_2.Config.from_hf(VALUES)
DOCUMENTS: tuple[tuple[Any, ...], ...] = ((2, (3, 3), 3), (4, (3, 3), 1, (3, 3), 2), (3,), ((3, 3), 2))


class Blip2ForConditionalGeneration(transformers.Blip2ForConditionalGeneration):
    """transformers' class, which reads texts without images too."""

    def forward(self, pixel_values: Any = None, input_ids: Any = None, **known: Any) -> Any:
        if pixel_values is None:
            return self.language_model(input_ids=input_ids, **known)
        return super().forward(pixel_values, input_ids, **known)


@functools.cache
def _reference() -> Any:
    config = AutoConfig.for_model(**VALUES)
    config._attn_implementation = "eager"
    return wrappers.perturbed(Blip2ForConditionalGeneration(config))


@functools.cache
def _params() -> Any:
    return wrappers.ours_of(on_disk(_reference()), CONFIG)


def test_packed_documents_with_images_equal_transformers_alone() -> None:
    with torch.no_grad():
        wanted = wrappers.alone(_reference(), DOCUMENTS, IMAGE, 4)
        logits, segment_ids = wrappers.cell_logits(blip_2, CONFIG, DOCUMENTS, IMAGE, _params())
        assert_close(logits[segment_ids > 0], wanted)
        queries = _params()["projector"]["queries"].flip(1)
        wrong = {**_params(), "projector": _params()["projector"] | {"queries": queries}}
        logits, _ = wrappers.cell_logits(blip_2, CONFIG, DOCUMENTS, IMAGE, wrong)
        assert (logits[segment_ids > 0] - wanted).abs().max() > 1e-2


def test_gradients_equal_transformers() -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params())
    logits, segment_ids = wrappers.cell_logits(blip_2, CONFIG, DOCUMENTS, IMAGE, params)
    logits[segment_ids > 0].square().sum().backward()
    model = _reference()
    model.zero_grad()
    wrappers.alone(model, DOCUMENTS, IMAGE, 4).square().sum().backward()
    wrappers.assert_gradients(model, CONFIG, params)


def test_files_are_read_and_written(tmp_path: Path) -> None:
    wrappers.assert_files(_reference(), CONFIG, tmp_path)
    wrappers.assert_text_alone(CONFIG, tmp_path)


def test_errors_name_what_does_not_fit() -> None:
    assert image_grid(torch.zeros(3, 12, 12), config=CONFIG) == (1, 1, QUERIES)
    with pytest.raises(ValueError, match=r"An image of blip-2 is \[3, 12, 12\], not \[3, 12, 16\]"):
        image_grid(torch.zeros(3, 12, 16), config=CONFIG)
    with pytest.raises(ValueError, match="Images must have 12 x 12 pixels"):
        blip_2.project(_params(), torch.zeros(1, 5, 16), torch.zeros(4, 1, 2, dtype=torch.long), config=CONFIG)
    with pytest.raises(ValueError, match="'use_decoder_only_language_model' is false"):
        blip_2.Config.from_hf(VALUES | {"use_decoder_only_language_model": False})
    assert fnmodels.tap_names(CONFIG.vision)["layers.0.attention"] == "[B, S, 16]"

"""Qwen3.5 with images equals transformers with every parameter perturbed; packed documents equal each alone."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

import params as P
import train
from fnmodels import tree
from fnmodels.models.vision_language import qwen3_5
from tests.support import wrappers
from tests.support.cases import batch_of, generic_params, off, segments
from tests.support.oracle import assert_close, on_disk
from tests.variants.qwen3_next import variants
from train.generation import speculate

IMAGE = 60  # the id of image tokens
BOUND = 1e-4  # the reference's chunked delta rule is off by up to 3e-5
_VISION: dict[str, Any] = {"depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 4, "patch_size": 4}
_VISION |= {"out_hidden_size": 32, "num_position_embeddings": 25}
_IDS = {"image_token_id": IMAGE, "video_token_id": 59, "vision_start_token_id": 58, "vision_end_token_id": 57}


def values_of(name: str) -> dict[str, Any]:
    parts = {"text_config": variants()[name], "vision_config": _VISION | {"model_type": f"{name}_vision"}}
    return {"model_type": name, "tie_word_embeddings": False, **_IDS, **parts}


NAMES = ("qwen3_5", "qwen3_5_moe")
DOCUMENTS: tuple[list[Any], ...] = ([2, (2, 3), 3], [5, (1, 4), 1, (3, 2), 4], [3], [(2, 2), 2])


def _config(name: str) -> qwen3_5.Config:
    return qwen3_5.Config.from_hf(values_of(name))


@functools.cache
def _reference(name: str) -> Any:
    config = AutoConfig.for_model(**values_of(name))
    config._attn_implementation = "eager"
    return wrappers.perturbed(AutoModelForImageTextToText.from_config(config))


@functools.cache
def _params(name: str) -> Any:
    return wrappers.ours_of(on_disk(_reference(name)), _config(name))


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_with_images_equal_transformers_alone(name: str) -> None:
    ours = functools.partial(wrappers.qwen_logits, qwen3_5, _config(name), DOCUMENTS, IMAGE, _params(name))
    with torch.no_grad():
        wanted = wrappers.each_alone(_reference(name), DOCUMENTS, IMAGE, 8)
        logits, segment_ids = ours()
        assert_close(logits[segment_ids > 0], wanted, bound=BOUND)
        assert (ours(text_order=True)[0][segment_ids > 0] - wanted).abs().max() > 1e-2


def test_gradients_equal_transformers() -> None:
    params = tree.map(lambda leaf: leaf.clone().requires_grad_(), _params("qwen3_5"))
    logits, segment_ids = wrappers.qwen_logits(qwen3_5, _config("qwen3_5"), DOCUMENTS, IMAGE, params)
    logits[segment_ids > 0].square().sum().backward()
    model = _reference("qwen3_5")
    model.zero_grad()
    wrappers.each_alone(model, DOCUMENTS, IMAGE, 8).square().sum().backward()
    wrappers.assert_gradients(model, _config("qwen3_5"), params)


@pytest.mark.parametrize("name", NAMES)
def test_files_are_read_and_written(name: str, tmp_path: Path) -> None:
    wrappers.assert_files(_reference(name), _config(name), tmp_path)
    wrappers.assert_text_alone(_config(name), tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_the_full_model_has_the_mtp_head_of_the_files(name: str, tmp_path: Path) -> None:
    """It is trained by batches of text, drafts after prompts of text, and is saved again; forward does not read it."""
    values = values_of(name)
    config = qwen3_5.Config.from_hf(values | {"text_config": values["text_config"] | {"mtp_num_hidden_layers": 1}})
    params = generic_params(config)
    P.save_pretrained(tmp_path, config, params)
    names = load_file(tmp_path / "model.safetensors").keys()
    around = {f"mtp.{part}.weight" for part in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    assert {one for one in names if one.startswith("mtp.") and ".layers.0." not in one} == around
    read, found = P.load_pretrained(tmp_path)
    assert read == config == qwen3_5.Config.from_hf(config.to_hf()) and off(found, params) == 0
    plain, without = P.load_pretrained(tmp_path, drop=("mtp",))
    assert plain == _config(name) and "mtp" not in without["text"]
    text = batch_of(config.text, segments((9, 6)))
    assert torch.equal(text.forward(found["text"]), text.forward(without["text"]))
    head = tree.map(lambda leaf: leaf.requires_grad_(), found["text"]["mtp"])
    ahead = train.losses.look_ahead(text.batch(), heads=1)
    train.mtp_loss(found["text"], ahead, config=config.text)[0].backward()
    assert all(leaf.grad.any() for leaf in tree.leaves(head) if leaf.dim() == 2)
    how: dict[str, Any] = {"prompts": [[3, 4, 5]], "max_new": 4, "ahead": 2, "seeds": 0}
    with torch.no_grad():
        drafted, _ = speculate(found["text"], config.text, None, None, **how)
    assert len(drafted.tokens[0]) == 4


def test_errors_name_what_does_not_fit() -> None:
    deep = _VISION | {"model_type": "qwen3_5_vision", "deepstack_visual_indexes": [0]}
    with pytest.raises(ValueError, match="vision_config: 'deepstack_visual_indexes' must be empty"):
        qwen3_5.Config.from_hf(values_of("qwen3_5") | {"vision_config": deep})
    with pytest.raises(ValueError, match=r"'model_type' is .qwen3_vl.; supported are qwen3_5, qwen3_5_moe"):
        qwen3_5.Config.from_hf(values_of("qwen3_5") | {"model_type": "qwen3_vl"})

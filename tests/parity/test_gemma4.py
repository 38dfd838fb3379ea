"""Gemma 4 checkpoints as published: within the wrapper, and with keys that no layer reads."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4Config, Gemma4ForConditionalGeneration

import fnmodels
import params as P
from tests.support.cases import Case, cases, forward, generic, seed_of, tokens_of
from tests.support.oracle import assert_close

NAMES = ("gemma4_text_e", "gemma4_text_moe", "gemma4_wrapped")


@pytest.mark.parametrize("case", [case for case in cases() if case.name in NAMES], ids=str)
def test_the_text_part(case: Case, tmp_path: Path) -> None:
    """The text model of transformers' wrapper: equal logits; saved with the same names and bits."""
    text = case.config.to_hf()["text_config"] if case.values is None else dict(case.values)
    wrapper = Gemma4Config(text_config=text, vision_config=None, audio_config=None)
    wrapper._attn_implementation, wrapper._experts_implementation = "eager", "eager"
    model = Gemma4ForConditionalGeneration(wrapper).eval()
    with torch.no_grad():
        for path, tensor in model.state_dict().items():
            tensor.copy_(generic(path, tensor))
    model.save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    theirs = load_file(file)
    if case.name == "gemma4_text_e":  # published files may hold them
        save_file(theirs | {"model.language_model.layers.2.self_attn.k_proj.weight": torch.zeros(16, 32)}, file)
    config, weights = P.load_pretrained(tmp_path / "theirs", part="text")
    assert config == case.config and config.model_type == "gemma4"
    tokens = tokens_of(config, 2, 24, seed=seed_of(case))
    ours = forward(weights, fnmodels.prepare(config, tokens), config=config, kernel="math")
    with torch.no_grad():
        assert_close(ours, model(input_ids=tokens, use_cache=False).logits)
    P.save_pretrained(tmp_path / "ours", config, weights)
    back = load_file(tmp_path / "ours" / "model.safetensors")
    assert back.keys() == theirs.keys() and all(torch.equal(back[name], theirs[name]) for name in back)

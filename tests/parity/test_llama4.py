"""Llama 4 checkpoints as published, with a vision tower, which is not read, and names of the text model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Llama4ForConditionalGeneration

import fnmodels
import params as P
from tests.support.cases import Case, cases, forward, generic, tokens_of
from tests.support.oracle import assert_close
from tests.variants import llama4 as variants

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vision_output_dim": 8,
    "image_size": 28,
    "projector_input_dim": 8,
    "projector_output_dim": 8,
}
PUBLISHED_VISION = VISION | {
    "hidden_size": 1408,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "intermediate_size": 5632,
    "vision_output_dim": 4096,
    "image_size": 336,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}
# Parameter counts of the published files, vision tower included.
TOTALS = {"llama4_scout": 108_641_793_536, "llama4_maverick": 401_583_781_376}


def _model(text: dict[str, Any], vision: dict[str, Any]) -> Any:
    config = AutoConfig.for_model("llama4", text_config=text, vision_config=vision, image_token_index=0)
    config._attn_implementation = "eager"
    return Llama4ForConditionalGeneration(config).eval()


@pytest.mark.parametrize("case", [case for case in cases() if case.config.model_type == "llama4"], ids=str)
def test_the_text_part_of_both(case: Case, tmp_path: Path) -> None:
    """The text model of a full checkpoint from transformers: equal logits; saved with the same names and bits."""
    model = _model(case.config.to_hf()["text_config"], VISION)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(generic(name, parameter))
    model.save_pretrained(tmp_path / "theirs")
    config, weights = P.load_pretrained(tmp_path / "theirs", part="text")
    assert config == case.config and config.model_type == "llama4"
    tokens = tokens_of(config, 2, 24).clamp(min=1)  # 0 is the image token
    ours = forward(weights, fnmodels.prepare(config, tokens), config=config, kernel="math")
    with torch.no_grad():
        assert_close(ours, model.language_model(input_ids=tokens, use_cache=False).logits)

    P.save_pretrained(tmp_path / "ours", config, weights)
    theirs, back = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert {name.partition(".")[0] for name in theirs.keys() - back.keys()} == {"vision_model", "multi_modal_projector"}
    assert all(torch.equal(back[name], theirs[name]) and back[name].dtype == theirs[name].dtype for name in back)
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    with torch.no_grad():
        assert_close(ours, text(tokens, use_cache=False).logits)


@pytest.mark.parametrize("name", TOTALS)
def test_published_totals_are_text_and_vision(name: str) -> None:
    few = {"num_hidden_layers": 1, "no_rope_layers": [1], "moe_layers": [], "num_local_experts": 1}
    with torch.device("meta"):
        model = _model(variants.published()[name]["text_config"] | few, PUBLISHED_VISION)
    vision = sum(p.numel() for path, p in model.named_parameters() if not path.startswith("language_model."))
    assert variants.sizes()[name] + vision == TOTALS[name]

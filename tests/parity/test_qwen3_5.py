"""Qwen3.5 checkpoints as published, with a vision tower, which is not read; and positions of time, height and width."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

import fnmodels
import params as P
from tests.support.cases import Case, cases, forward, generic, tokens_of
from tests.support.oracle import EAGER, assert_close

VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
WRAPPED = [case for case in cases() if case.config.model_type in ("qwen3_5", "qwen3_5_moe")]
BOUND = 1e-4  # see the reference's own noise: its chunked delta rule is off by up to 3e-5


def model_of(case: Case) -> torch.nn.Module:
    """The reference with its vision tower; every parameter is generic."""
    values = case.config.to_hf()
    config = AutoConfig.for_model(values["model_type"], text_config=values["text_config"], vision_config=VISION)
    model: torch.nn.Module = AutoModelForImageTextToText.from_config(config, **EAGER, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(generic(name, parameter))
    return model


@pytest.mark.parametrize("case", WRAPPED, ids=str)
def test_the_text_part_of_both(case: Case, tmp_path: Path) -> None:
    """The text model of a full checkpoint from transformers: equal logits; saved with the same names and bits."""
    model = model_of(case)
    model.save_pretrained(tmp_path / "theirs")
    config, weights = P.load_pretrained(tmp_path / "theirs", part="text")
    assert config == case.config and config.model_type == case.config.model_type
    tokens = tokens_of(config, 2, 24)
    ours = forward(weights, fnmodels.prepare(config, tokens), config=config, kernel="math")
    with torch.no_grad():
        assert_close(ours, model(input_ids=tokens, use_cache=False).logits, bound=BOUND)

    P.save_pretrained(tmp_path / "ours", config, weights)
    theirs, back = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert all(name.startswith("model.visual.") for name in theirs.keys() - back.keys())
    assert all(torch.equal(back[name], theirs[name]) and back[name].dtype == theirs[name].dtype for name in back)


def with_image(before: int, height: int, width: int, after: int) -> Tensor:
    """Positions [S, 3] of a document: words, an image of height x width tokens, words."""
    words = torch.arange(before)[:, None].expand(-1, 3)
    rows, columns = (
        axis.flatten() for axis in torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    )
    image = before + torch.stack((torch.zeros_like(rows), rows, columns), -1)
    rest = before + max(height, width) + torch.arange(after)[:, None].expand(-1, 3)
    return torch.cat((words, image, rest))


@pytest.mark.parametrize("case", WRAPPED, ids=str)
def test_positions_of_time_height_and_width(case: Case, tmp_path: Path) -> None:
    """Where axes differ, as in transformers; where they are equal, as without axes; packed, as each document alone."""
    model = model_of(case)
    model.save_pretrained(tmp_path)
    config, weights = P.load_pretrained(tmp_path, part="text")

    def logits(tokens: Tensor, positions: Tensor | None = None, segment_ids: Tensor | None = None) -> Tensor:
        given = fnmodels.prepare(config, tokens, positions=positions, segment_ids=segment_ids)
        return forward(weights, given, config=config, kernel="math")

    documents = [with_image(3, 2, 4, 6), with_image(7, 3, 1, 2), with_image(1, 0, 0, 0), with_image(2, 2, 2, 0)]
    texts = [tokens_of(config, 1, len(positions), seed=i) for i, positions in enumerate(documents)]
    alone = []
    for tokens, positions in zip(texts, documents, strict=True):
        alone.append(logits(tokens, positions[None]))
        with torch.no_grad():
            theirs = model(input_ids=tokens, position_ids=positions.t()[:, None], use_cache=False).logits
        assert_close(alone[-1], theirs, bound=BOUND)
    plain = logits(texts[0])
    assert (plain - alone[0])[:, 4:].abs().max() > 1e-2
    assert torch.equal(logits(texts[0], torch.arange(len(documents[0]))[None, :, None].expand(-1, -1, 3)), plain)

    packed = fnmodels.pack([text[0] for text in texts], sum(map(len, documents)) + 2)
    positions = torch.nn.functional.pad(torch.cat(documents), (0, 0, 0, 2))[None]
    counted = torch.cat((packed.positions[..., None], positions), -1)
    for given in (positions, counted):
        together = logits(packed.tokens, given, packed.segment_ids)[:, :-2]
        assert (together - torch.cat(alone, 1)).abs().max() < 1e-5 * max(1.0, float(together.std()))

"""Mistral Large 4: its text within a model with images, its parts one by one, and what is refused."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fnmodels
import params as P
from fnmodels import mistral_large4
from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.ops import rotary
from tests.support.cases import generic, generic_params, off, positions_of, segments
from tests.support.oracle import assert_close, logits_of, model_of, params_of
from tests.support.status import Shows
from tests.variants.mistral_large4 import TINY

ROWS = segments((-2, 9, 13), (19, 5))


def test_the_text_of_published_files_is_read(tmp_path: Path, shows: Shows) -> None:
    """A model with images, saved by transformers: its text is read, and gives the text's logits."""
    shows("mistral_large4", "parity")
    vision = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"head_dim": 8, "image_size": 28, "patch_size": 14, "model_type": "pixtral"}
    config = transformers.AutoConfig.for_model(
        "mistral_large4", text_config=TINY, vision_config=vision, image_token_index=9
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(generic(name, tensor))
    model.save_pretrained(tmp_path)
    config, params = P.load_pretrained(tmp_path, part="text")
    tokens = torch.randint(10, 61, (1, 20), generator=torch.Generator().manual_seed(3))
    ours = fnmodels.forward(params, *fnmodels.prepare(config, tokens), config=config, kernel="math")
    with torch.no_grad():
        theirs = model(input_ids=tokens, use_cache=False).logits
    assert off(ours, theirs) < 2e-5 and config.model_type == "mistral_large4"
    P.save_pretrained(tmp_path / "again", config, params)
    assert off(P.load_pretrained(tmp_path / "again")[1], params) == 0


def check_documents() -> None:
    """Logits of packed documents are those that transformers has of each alone."""
    config = mistral_large4.Config.from_hf(TINY)
    params = params_of(model_of(TINY), config)
    tokens = torch.randint(61, ROWS.shape, generator=torch.Generator().manual_seed(1))
    prepared = fnmodels.prepare(config, tokens, positions=positions_of(ROWS), segment_ids=ROWS)
    got: Any = fnmodels.forward(params, *prepared, config=config, kernel="math")
    for row, segment in ((0, 1), (0, 2), (1, 1), (1, 2)):
        own = ROWS[row] == segment
        assert_close(got[row, own], logits_of(TINY, tokens[row, own][None])[0])


def test_each_document_is_that_of_transformers_alone() -> None:
    check_documents()


def without_alpha(rope: Any, head_dim: int, positions: Tensor, alpha: Tensor) -> Tensor:
    return rotary.rotary_table(rope, head_dim, positions)


def unscaled(q: Tensor, *_: Tensor) -> Tensor:
    return q


def of_heads_in_another_order(q: Tensor, logs: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    return rotary.scaled_by_position(q, logs, scale.flip(0), shift)


BUGS = {
    "frequencies are those of the config": ("learned_table", without_alpha),
    "queries are not scaled": ("scaled_by_position", unscaled),
    "another head's factor": ("scaled_by_position", of_heads_in_another_order),
    "positions count from 1": ("log_positions", lambda positions: torch.log1p(positions.double() + 1).float()),
    "the eps of other models": ("_widths", lambda config, kind: right_widths(config, kind)._replace(eps=1e-6)),
}
right_widths = mistral_large4._widths


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistral_large4, *BUGS[bug])
    with pytest.raises(AssertionError):
        check_documents()


def test_learned_frequencies_by_hand() -> None:
    alpha, rope = torch.tensor([0.3, -0.2], dtype=torch.float64), fnmodels.ops.rotary.Rope(100.0)
    table = rotary.learned_table(rope, 4, torch.tensor([[0, 5]]), alpha)
    angles = [5 * 100.0 ** (-i / 2) * math.exp(alpha[i]) for i in range(2)]
    want = torch.tensor([[math.cos(angle), math.sin(angle)] for angle in angles], dtype=torch.float64)
    torch.testing.assert_close(table[0, 1], want)
    assert (
        table.dtype == torch.float64
        and rotary.learned_table(rope, 4, torch.tensor([[0]]), alpha.float()).dtype == torch.float32
    )


def test_bare_tokens_are_refused() -> None:
    config = mistral_large4.Config.from_hf(TINY)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    _, masks, freqs = fnmodels.prepare(config, tokens)
    inputs = {"tokens": tokens, "valid": tokens == 0}
    with pytest.raises(ValueError, match="frequencies of Mistral Large 4 are parameters, so it needs the dict"):
        fnmodels.forward(generic_params(config), inputs, masks, freqs, config=config)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kv_source_layers": [0, 0, 2, 3]}, "'kv_source_layers' is"),
        ({"q_lora_rank": 8}, "'q_lora_rank' is 8; only null is supported"),
        ({"indexer_types": ["shared", "full", "full", "full"]}, "The first layer must have an indexer"),
        ({"no_rope_layers": [1, 0, 1]}, "must list 0 or 1 for each layer"),
        ({"no_rope_layers": [1, 0, 2, 1]}, "must list 0 or 1 for each layer"),
        ({"norm_topk_prob": False}, "'norm_topk_prob' is false"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "at any length"),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match=sentence):
        mistral_large4.Config.from_hf(TINY | changes)


def test_defaults_are_those_of_transformers() -> None:
    config = mistral_large4.Config.from_hf({"model_type": "mistral_large4_text"})
    theirs = transformers.AutoConfig.for_model("mistral_large4_text")
    assert config == mistral_large4.Config.from_hf(theirs.to_dict())
    assert sum("nope" in kind for kind in config.layer_kinds) == 18 and config.rope.kind == "yarn"
    listed = mistral_large4.Config.from_hf(TINY | {"no_rope_layers": None, "no_rope_layer_interval": 2})
    assert ["nope" in kind for kind in listed.layer_kinds] == [False, True, False, True]

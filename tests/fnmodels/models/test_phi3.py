"""Phi-3's config.json: where the original context stands, older names of longrope, and which factors a table takes."""

from typing import Any

import pytest
import torch

from fnmodels import phi3
from fnmodels.errors import ConfigError, UnsupportedError
from tests.variants.phi3 import variants

LONG = variants()["phi3_longrope_long"]  # its original context is 16
TABLE = phi3.Config.from_hf(LONG)


def _with(rope: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return LONG | {"rope_parameters": LONG["rope_parameters"] | rope} | changes


def _read(values: dict[str, Any]) -> phi3.Config:
    return phi3.Config.from_hf(values)


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_older_names_mean_longrope(name: str) -> None:
    assert _read(_with({"rope_type": name})) == TABLE
    rope = {key: value for key, value in LONG["rope_parameters"].items() if key not in ("rope_type", "rope_theta")}
    older = {key: value for key, value in LONG.items() if key != "rope_parameters"}
    assert _read(older | {"rope_theta": 100.0, "rope_scaling": rope | {"type": name}}) == TABLE


def test_the_original_context_at_the_top_wins() -> None:
    assert TABLE.rope.original_max_position_embeddings == 16 and TABLE.rope.factor == 4.0
    assert _read(_with({"original_max_position_embeddings": 32})) == TABLE
    assert TABLE.to_hf()["original_max_position_embeddings"] == 16


def test_the_original_context_in_the_rope_alone_is_refused() -> None:
    """transformers would take its default, 4096, whatever the rope says."""
    with pytest.raises(ConfigError, match="'original_max_position_embeddings' is 32 in the rope alone"):
        _read(_with({"original_max_position_embeddings": 32}, original_max_position_embeddings=None))
    same = _with({"original_max_position_embeddings": 4096}, original_max_position_embeddings=None)
    assert _read(same).rope.original_max_position_embeddings == 4096


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("attention_bias", True), ("mlp_bias", True), ("lm_head_bias", True)),
        *(("full_attn_mod", 2), ("interpolate_factor", 4)),
    ],
)
def test_what_would_change_the_maths_is_refused(field: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=field):
        _read(LONG | {field: value})


def test_other_scalings_are_refused() -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(UnsupportedError, match="'linear'; phi3 has default and longrope"):
        _read(LONG | {"rope_parameters": rope})


def test_the_length_alone_chooses_the_factors() -> None:
    """Not what was asked for before, and not, where it is said, the positions of the call."""
    positions = torch.arange(24)[None]

    def table(length: int | torch.Tensor | None, upto: int = 24) -> torch.Tensor:
        return phi3.freqs_cis(TABLE, positions[:, :upto], length=length)["sliding"]

    short, long = table(16), table(17)
    assert not torch.equal(short[:, 1], long[:, 1])
    assert torch.equal(table(None), long) and torch.equal(table(None, 16), short[:, :16])
    assert torch.equal(table(None), long), "the same after a shorter call"
    assert torch.equal(table(24, 8), long[:, :8]), "a piece of a long sequence"
    rows = phi3.freqs_cis(TABLE, positions.expand(2, -1), length=torch.tensor([10, 24]))["sliding"]
    assert torch.equal(rows, torch.cat((short, long))), "a length for each row"

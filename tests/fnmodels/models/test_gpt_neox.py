"""How GPT-NeoX's files say which part of a head rotates, and what they cannot say."""

import pytest

import fnmodels
from tests.support.cases import cases

VALUES = next(case.values for case in cases() if case.name == "gpt_neox")
read = fnmodels.family_for("gpt_neox").Config.from_hf


def test_the_rope_has_two_dialects_and_no_third() -> None:
    bare = {name: value for name, value in VALUES.items() if name != "rope_parameters"}
    older = read({**bare, "rotary_emb_base": 100, "rotary_pct": 0.5}).rope
    newer = read({**bare, "rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}}).rope
    assert older == newer and (older.theta, older.partial) == (100.0, 0.5)
    assert (read(bare).rope.theta, read(bare).rope.partial) == (1e4, 0.25)
    for name, own in (("rope_theta", "rotary_emb_base"), ("partial_rotary_factor", "rotary_pct")):
        with pytest.raises(fnmodels.errors.ConfigError, match=own):  # transformers would not read it
            read({**bare, name: 0.5})


def test_heads_divide_the_width() -> None:
    for field in ({"head_dim": 8}, {"num_key_value_heads": 1}):
        with pytest.raises(fnmodels.errors.ConfigError, match="divides hidden_size 48 among 3 heads"):
            read({**VALUES, **field})

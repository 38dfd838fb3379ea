"""What the Mamba-2 families share: wrong fields, infinity in config.json, and the limits of dt at decode."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fnmodels
import params as P
from tests.support.cases import batch_of, cases, generic_params, off, segments
from tests.variants import bamba, mamba2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (mamba2.TINY | {"num_heads": 3}, "3 heads of 16 are not the inner width 64"),
        (mamba2.TINY | {"n_groups": 3}, "4 heads .* are not a multiple of its 3 groups"),
        (mamba2.TINY | {"conv_kernel": 1}, "at least 2 taps"),
        (mamba2.TINY | {"time_step_limit": [0.1]}, r"'time_step_limit' is \[0.1\], but must be two numbers"),
        (mamba2.TINY | {"time_step_limit": [-1.0, 1.0]}, "two numbers from 0 to infinity"),
        (mamba2.TINY | {"time_step_limit": [0.0, 10**400]}, "two numbers from 0 to infinity"),
        (bamba.TINY | {"attn_layer_indices": [2]}, r"'attn_layer_indices' is \[2\], but must list layers below 2"),
        (bamba.TINY | {"attn_rotary_emb": 8}, "'attn_rotary_emb' is 8; only 4 is supported"),
    ],
)
def test_wrong_fields(values: dict[str, Any], said: str) -> None:
    with pytest.raises(fnmodels.errors.CheckpointError, match=said):
        fnmodels.family_for(values["model_type"]).Config.from_hf(values)


def test_infinity_is_written_as_json_has_it(tmp_path: Path) -> None:
    """transformers writes it so; older files have the word Infinity, which Python reads as a number."""
    read = fnmodels.family_for("mamba2").Config.from_hf
    config = read(mamba2.TINY | {"time_step_limit": [0.0, float("inf")]})
    P.save_pretrained(tmp_path, config, generic_params(config))
    text = (tmp_path / "config.json").read_text()
    values = json.loads(text, parse_constant=pytest.fail)
    assert values["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    assert read(values) == config == P.load_pretrained(tmp_path)[0]


@pytest.mark.parametrize("name", ["mamba2_bias_untied", "falcon_h1_norm", "bamba_bias_tied"])
def test_a_decode_step_without_the_limits_of_dt_is_seen(name: str) -> None:
    """transformers' own decode step forgets them."""
    config = next(case.config for case in cases() if case.name == name)
    forgetful = dataclasses.replace(config, mixer=dataclasses.replace(config.mixer, limits=(0.0, float("inf"))))
    params, batch = generic_params(config), batch_of(config, segments((9,)))
    before, wanted = batch.take(slice(None), slice(8)), batch.forward(params)[:, 8]
    cache = fnmodels.init_cache(config, 1, 9, length=batch.length)
    _, cache = fnmodels.prefill(params, *fnmodels.prepare_step(config, before.tokens, cache), cache, config=config)
    step = fnmodels.prepare_step(config, batch.tokens[:, 8:], cache)
    right, _ = fnmodels.prefill(params, *step, cache, config=config)
    wrong, _ = fnmodels.prefill(params, *step, cache, config=forgetful)
    assert off(right, wanted) < 1e-5 and off(wrong, wanted) > 1e-2 and torch.isfinite(wrong).all()

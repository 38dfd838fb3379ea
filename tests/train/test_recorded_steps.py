"""Five steps of three small models in fp64: losses, norms and parameters are those that were recorded at a96f031f.

They hold the mathematics of a step still while its code changes for speed: of the losses, gradients, clipping, AdamW,
balancing of experts, microbatches and packing. Other values are a decision, with its reason in CHANGELOG.md. They are
then recorded anew by FNMODELS_RECORD_STEPS=1 with a run of this file, and the commit above is that of the decision.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fnmodels
import train
from fnmodels import tree
from tests.support.cases import batch_of, cases, generic_params, is_ordered, is_routed, segments

RECORDS = Path(__file__).with_name("recorded_steps.json")
MODELS = {"packed": "qwen3_bias_sliding", "experts": "deepseek_v3", "recurrent": "mamba2"}
F64 = torch.float64
NUMBERS = ("loss", "count", "grad_norm")


def measured(name: str, accumulate: int = 1) -> dict[str, list[float]]:
    """{name: its value in or after each of five steps}, of which "params" is a product with a fixed vector."""
    case = next(case for case in cases() if case.name == MODELS[name])
    config, found = case.config, {key: list[float]() for key in (*NUMBERS, "params")}
    assert is_routed(config) == (name == "experts") and is_ordered(case) == (name == "recurrent")
    # A large eps, as otherwise AdamW scales up the rounding of tiny gradients.
    optimizer = train.adamw(
        lambda step: 1e-2 / (1 + step), eps=1e-3, weight_decay=0.1, spec=fnmodels.family_of(config).spec(config)
    )
    loss = functools.partial(train.next_token_loss, config=config, z_loss=1e-3)
    options = {"clip": 0.5, "accumulate": accumulate} | ({"balance_rate": 0.01} if name == "experts" else {})
    step, state = train.make_step(loss, optimizer, **options), train.init_state(generic_params(config, F64), optimizer)
    for seed in range(5):
        batch = batch_of(config, segments((4, 7, 2), (6, 5, -2), (13,)), seed=seed).batch()
        state, metrics = step(state, batch)
        for key in NUMBERS:
            found[key].append(metrics[key].item())
        found["params"].append(product(state.params))
    return found


def product(params: Any) -> float:
    """Of all numbers with other numbers, so that no change of one is left out."""
    flat = torch.cat([leaf.flatten().double() for leaf in tree.leaves(params)])
    return (flat @ torch.arange(len(flat), dtype=F64).cos()).item()


def off(found: dict[str, list[float]], name: str) -> float:
    """The largest relative difference from what was recorded."""
    if os.environ.get("FNMODELS_RECORD_STEPS"):
        records = json.loads(RECORDS.read_text()) if RECORDS.exists() else {}
        RECORDS.write_text(json.dumps(records | {name: found}, indent=1) + "\n")
    wanted = json.loads(RECORDS.read_text())[name]
    assert wanted.keys() == found.keys()
    errors = [abs(a - b) / max(1.0, abs(b)) for key in wanted for a, b in zip(found[key], wanted[key], strict=True)]
    return max(errors)


@pytest.mark.parametrize("name", MODELS)
def test_five_steps_are_those_that_were_recorded(name: str) -> None:
    assert off(measured(name), name) < 1e-12


def test_microbatches_have_the_same_steps() -> None:
    assert off(measured("packed", 3), "packed") < 1e-12


def test_a_loss_that_is_off_by_a_little_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = train.next_token_loss

    def scaled(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        total, count = real(*args, **options)
        return total * (1 + 1e-11), count

    monkeypatch.setattr(train, "next_token_loss", scaled)
    assert off(measured("packed"), "packed") > 1e-12

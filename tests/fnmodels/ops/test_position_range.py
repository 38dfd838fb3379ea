"""Positions past the range of rotary tables: one warning per config with the number, an error where a filter asks."""

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import fnmodels
import train
from fnmodels import clip, t5
from fnmodels.errors import PositionWarning
from fnmodels.inputs.values import without_host
from fnmodels.ops import position_range
from tests.support.cases import Case, cases, generic_params, richest
from tests.variants.t5 import variants

LLAMA = next(case.config for case in cases() if case.name == "llama")
RANGES = {  # of variants: the default, scalings by a factor, and what does not rotate
    "llama": 16,
    "llama_yarn": 256,
    "llama_llama3": 128,
    "llama_dynamic": 48,
    "llama_longrope_factor": 64,
    "llama_linear": 64,
    "qwen3_5": 64,
    "modernbert": 64,
    "gpt2": None,
    "bert": None,
    "mamba2": None,
    "olmo_hybrid_nope": 64,
}


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(position_range, "_first", {})


@pytest.fixture
def shown() -> Iterator[list[warnings.WarningMessage]]:
    """The warnings that Python's default filter shows."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("default")
        yield found


def zeros(length: int) -> torch.Tensor:
    return torch.zeros(1, length, dtype=torch.int64)


@pytest.mark.parametrize("case", [case for case in cases() if case.name in RANGES], ids=str)
def test_position_range_is_that_of_the_config_and_its_scaling(case: Case) -> None:
    assert position_range.position_range(case.config) == RANGES[case.name]


def test_position_range_of_models_without_rotary_tables_is_none() -> None:
    text = clip.Config.from_hf({"model_type": "clip"}).text
    for config in (text, t5.Config.from_hf(variants()["t5"])):
        assert position_range.position_range(config) is None


def test_prepare_past_the_range_warns_once_per_config(shown: list[warnings.WarningMessage]) -> None:
    fnmodels.prepare(LLAMA, zeros(16))
    fnmodels.prepare(LLAMA, zeros(1), positions=torch.tensor([[15]]))
    assert not shown
    for length in (17, 18, 30):
        fnmodels.prepare(LLAMA, zeros(length))
        fnmodels.prepare(LLAMA, zeros(1), positions=torch.tensor([[length]]))
    fnmodels.prepare(replace(LLAMA, max_position_embeddings=17), zeros(18))
    said = [str(one.message) for one in shown]
    assert len(said) == 2 and all(one.category is PositionWarning for one in shown)
    assert said[0].startswith("Positions reach 17, and this model's rotary tables are for 16 ")
    assert said[1].startswith("Positions reach 18, and this model's rotary tables are for 17 ")


def test_packed_documents_within_the_range_do_not_warn(shown: list[warnings.WarningMessage]) -> None:
    packed = fnmodels.pack([list(range(12)), list(range(14))], 32)
    fnmodels.prepare(LLAMA, packed.tokens, positions=packed.positions, segment_ids=packed.segment_ids)
    assert not shown


def test_past_the_range_is_an_error_of_each_call_by_a_filter() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=PositionWarning)
        for count in (17, 40):
            with pytest.raises(PositionWarning, match=f"Positions reach {count}, .* are for 16 "):
                fnmodels.prepare(LLAMA, zeros(1), positions=torch.tensor([[count - 1]]))


def step(config: Any, params: Any) -> None:
    cache = fnmodels.init_cache(config, 1, 20)
    fnmodels.prepare_step(config, zeros(1), cache, positions=torch.tensor([[18]]))


def answer(config: Any, params: Any) -> None:
    train.generate(params, config, [[1, 2, 3]], max_new=17)


def loss(config: Any, params: Any) -> None:
    batch = {name: zeros(19) for name in ("tokens", "labels")} | {"segment_ids": zeros(19) + 1}
    train.next_token_loss(params, batch | {"positions": torch.arange(19)[None]}, config=config)


@pytest.mark.parametrize("run", [step, answer, loss])
def test_steps_generation_and_losses_past_the_range_warn_once(
    run: Callable[[Any, Any], None], shown: list[warnings.WarningMessage]
) -> None:
    for _ in range(2):
        run(LLAMA, generic_params(LLAMA))
    assert [bool(re.match("Positions reach 19, .* are for 16 ", str(one.message))) for one in shown] == [True]


@pytest.mark.parametrize("case", [case for case in richest() if position_range.position_range(case.config)], ids=str)
def test_every_family_with_rotary_tables_warns(case: Case, shown: list[warnings.WarningMessage]) -> None:
    most = position_range.position_range(case.config)
    assert most is not None
    tables = fnmodels.tree.leaves(fnmodels.prepare(case.config, zeros(1), length=1)[2])
    if not any(table.ndim == 4 and table.shape[2] for table in tables):
        fnmodels.prepare(case.config, zeros(most + 1), length=most + 1)
        assert not shown
        return
    with pytest.warns(PositionWarning, match=f"Positions reach {most + 1}, .* are for {most} "):
        fnmodels.prepare(case.config, zeros(most + 1), length=most + 1)


def test_positions_of_several_axes_are_those_of_the_highest(shown: list[warnings.WarningMessage]) -> None:
    config = next(case.config for case in cases() if case.name == "qwen3_5")
    fnmodels.prepare(config, zeros(1), positions=torch.tensor([[[100, 3, 4, 63]]]))  # the order, and three axes
    assert not shown
    fnmodels.prepare(config, zeros(1), positions=torch.tensor([[[3, 4, 64]]]))
    assert str(shown[0].message).startswith("Positions reach 65, ")


def test_positions_are_not_read_where_the_host_is_away(shown: list[warnings.WarningMessage]) -> None:
    with without_host({}):
        fnmodels.prepare(LLAMA, zeros(1), positions=torch.tensor([[99]]))
    assert not shown


def test_mapped_positions_past_the_range_warn(shown: list[warnings.WarningMessage]) -> None:
    def tables(positions: torch.Tensor) -> torch.Tensor:
        return fnmodels.prepare(LLAMA, zeros(2), positions=positions)[2]["full"]

    torch.func.vmap(tables)(torch.full((3, 1, 2), 15))
    assert not shown
    torch.func.vmap(tables)(torch.tensor([[[1, 2]], [[3, 99]]]))
    assert str(shown[0].message).startswith("Positions reach 100, ")


def test_positions_of_padding_are_not_compared_with_the_range(shown: list[warnings.WarningMessage]) -> None:
    ids = torch.tensor([[1] * 10 + [0] * 10])
    fnmodels.prepare(LLAMA, zeros(20), positions=torch.arange(20)[None], segment_ids=ids)
    assert not shown


def test_configs_that_warned_are_remembered_within_a_bound(shown: list[warnings.WarningMessage]) -> None:
    for size in range(16, 116):
        fnmodels.prepare(replace(LLAMA, max_position_embeddings=size), zeros(size + 1))
    assert len(position_range._first) == position_range._KEPT and len(shown) == 100

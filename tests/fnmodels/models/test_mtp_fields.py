"""Fields of MTP heads that a family cannot have are refused when a Config is made."""

from dataclasses import replace
from typing import Any

import pytest

from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.decoder import bailing_hybrid, ernie, exaone_moe, minimax_m3, nemotron_h, step3p5
from tests.support.cases import cases
from tests.support.mtp import mtp_cases, with_heads

CONFIGS: dict[str, Any] = {case.name: with_heads(case.config, 1) for case in mtp_cases()}
ONE = [name for name, c in CONFIGS.items() if isinstance(c, (ernie.Config, exaone_moe.Config, minimax_m3.Config))]
STEP = next(case.values for case in cases() if case.name == "step3p5")


@pytest.mark.parametrize("name", ONE)
def test_a_family_with_one_head_refuses_more(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"num_nextn_predict_layers is 2; the MTP heads of this family are from 0 to 1"
    ):
        replace(CONFIGS[name], num_nextn_predict_layers=2)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_family_has_a_negative_number_of_heads(name: str) -> None:
    with pytest.raises((ConfigError, UnsupportedError), match="-1"):
        replace(CONFIGS[name], num_nextn_predict_layers=-1)


def test_a_block_has_one_layer_with_experts() -> None:
    config = next(config for config in CONFIGS.values() if isinstance(config, nemotron_h.Config))
    with pytest.raises(ConfigError, match="one of them at most may have experts"):
        replace(config, mtp_layer_kinds=("full", "mlp_moe", "mlp_moe"))


def test_a_model_of_delta_layers_has_no_head_unless_it_counts_one() -> None:
    few = {"model_type": "bailing_hybrid", "num_hidden_layers": 4}
    assert bailing_hybrid.Config.from_hf(few).num_nextn_predict_layers == 0
    assert bailing_hybrid.Config.from_hf(few | {"num_hidden_layers": 6}).num_nextn_predict_layers == 1
    with pytest.raises(ConfigError, match="none that attends like it"):
        bailing_hybrid.Config.from_hf(few | {"num_nextn_predict_layers": 1})


def test_step_names_a_wrong_layer() -> None:
    rest = {name: value for name, value in STEP.items() if name != "mlp_layer_types"}
    with pytest.raises(ConfigError, match="moe_layers_enum"):
        step3p5.Config.from_hf(rest | {"moe_layers_enum": "3,²"})

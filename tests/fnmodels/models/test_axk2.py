"""A.X K2: groups of experts are both given or both null."""

from typing import Any

import pytest

from fnmodels import axk2
from fnmodels.errors import ConfigError
from tests.variants.axk2 import TINY


def test_null_groups_are_one_group() -> None:
    config = axk2.Config.from_hf(TINY | {"n_group": None, "topk_group": None})
    assert (config.n_group, config.topk_group) == (1, 1)
    assert config.to_hf()["n_group"] is None and axk2.Config.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("values", [{"n_group": None}, {"topk_group": None}])
def test_one_of_two_groups_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"'n_group': .*; both or none must be null"):
        axk2.Config.from_hf(TINY | values)

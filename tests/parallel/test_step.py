"""The train step over meshes of several dimensions is that of one process."""

from typing import Any

import pytest

from tests.parallel.pool import Ranks
from tests.parallel.reference import errors_of, worst
from train.parallel import Mesh

EVEN = ("even qwen3_bias_sliding", "even deepseek_v3", "even gpt_oss")
WAYS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("tp=2", {}, {}),
    ("cp=2", {}, {}),
    ("fsdp=2,tp=2", {"remat": "full"}, {}),
    ("dp=2,tp=2", {"accumulate": 2}, {"sequence": True}),
    ("fsdp=2,cp=2", {"accumulate": 2}, {"context": "ring", "order": "head_tail"}),
    ("cp=2,tp=2", {}, {"context": "gather", "sequence": True}),
)

ROUTED = ("experts deepseek_v3", "experts gpt_oss")
WITH_EXPERTS: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("ep=2", {}, {}),
    ("fsdp=2,ep=2", {"accumulate": 2}, {}),
    ("ep=4", {"remat": "full"}, {}),
    ("ep=2,tp=2", {}, {}),
    ("ep=2,cp=2", {}, {}),
)


@pytest.mark.parametrize("name", EVEN)
@pytest.mark.parametrize(("mesh", "options", "strategy"), WAYS, ids=lambda value: str(value))
def test_a_step_is_that_of_one_process(
    ranks: Ranks, name: str, mesh: str, options: dict[str, Any], strategy: dict[str, Any]
) -> None:
    found = ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, options, strategy)
    assert worst(found)[0] < 1e-5, worst(found)


@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize(("mesh", "options", "strategy"), WITH_EXPERTS, ids=lambda value: str(value))
def test_experts_are_divided_too(
    ranks: Ranks, name: str, mesh: str, options: dict[str, Any], strategy: dict[str, Any]
) -> None:
    found = ranks(Mesh.parse(mesh).world)(errors_of, name, mesh, options, strategy)
    assert worst(found)[0] < 1e-5, worst(found)

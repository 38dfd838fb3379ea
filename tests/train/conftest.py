"""Fixtures of all tests of `train`: pictures are rendered only where a test takes `rendered`."""

import pytest

from tests.support.pictures import leave_out_pixels
from tests.support.traced import without_generated_code


@pytest.fixture
def rendered() -> None:
    """Pictures of this test have pixels."""


@pytest.fixture(autouse=True)
def _pictures_without_pixels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "rendered" not in request.fixturenames:
        leave_out_pixels(monkeypatch)


@pytest.fixture
def graphs():
    """The graphs that are compiled, whose functions run one by one: for tests of what becomes a graph, and when."""
    with without_generated_code(lowered=False) as compiled:
        yield compiled


@pytest.fixture
def lowered():
    """`graphs` of operations of ATen, derivatives among them: for tests of what models make of these."""
    with without_generated_code() as compiled:
        yield compiled

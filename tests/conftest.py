"""Settings of every test: property tests draw the same examples on each run, and no deadline, for compilers warm up."""

import gc
from collections.abc import Iterator

import hypothesis
import pytest

from tests.support.forks import Forks
from tests.support.selection import model_types_of
from tests.support.status import Status

hypothesis.settings.register_profile("fnmodels", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fnmodels")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Status())


def pytest_itemcollected(item: pytest.Item) -> None:
    """`-k MODEL_TYPE` selects every test of a type: of its variants, its presets, its family, whatever their names."""
    if hasattr(item, "callspec"):
        item.extra_keyword_matches |= model_types_of(item.callspec.params)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collecting makes millions of objects that stay: looking for garbage among them takes a quarter of its time, and
    would take more in every test that makes many."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """forks.run(arguments) runs a program without a start of Python: see tests.support.forks."""
    made = Forks()
    yield made
    made.close()

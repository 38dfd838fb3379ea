"""Settings of every test: property tests draw the same examples on each run, and no deadline, for compilers warm up."""

import hypothesis
import pytest

from tests.status import Status

hypothesis.settings.register_profile("fnmodels", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fnmodels")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Status())

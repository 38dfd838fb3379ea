"""Settings of every test: property tests draw the same examples on each run, and no deadline, for compilers warm up."""

import gc
import os
import sys
from collections.abc import Iterator

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from tests.support.forks import Forks
from tests.support.lanes import Lanes
from tests.support.selection import model_types_of
from tests.support.shared_trees import Guard
from tests.support.status import Shows, Status

hypothesis.settings.register_profile("fnmodels", deadline=None, derandomize=True)
hypothesis.settings.load_profile("fnmodels")
# It would draw numbers that stand in the sources of the modules that are loaded. These differ between the processes of
# a run, and reading them takes each process four seconds.
providers.is_local_module_file = lambda path: False
FSYNC = os.fsync


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Status())
    config.pluginmanager.register(Lanes())
    config.pluginmanager.register(Guard())
    # tiny configs are for few positions
    config.addinivalue_line("filterwarnings", "ignore::fnmodels.errors.PositionWarning")


def pytest_itemcollected(item: pytest.Item) -> None:
    """`-k MODEL_TYPE` selects every test of a type: of its variants, its presets, its family, whatever their names."""
    if hasattr(item, "callspec"):
        item.extra_keyword_matches |= model_types_of(item.callspec.params)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collecting makes millions of objects that stay: looking for garbage among them takes a quarter of its time, and
    would take more in every test that makes many. Later, too, it is looked for more rarely: graphs are large."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(2000, 10, 50)
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With xdist, tests that share a server of processes go to one worker, and begin first.

    A worker's first share is a quarter of what it has of all tests, in their order: tests over several ranks begin the
    first worker's, those of `project` the second's. So there is one pool of ranks and one server of forks, and no long
    test is the last. Tests that fork their own process hundreds of times come before it has grown to gigabytes.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers < 2:
        return
    share = len(items) // workers // 4
    first = ("tests/train/parallel/", "tests/damage/test_cut_points.py", "tests/project/", "")
    groups: dict[str, list[pytest.Item]] = {name: [] for name in first}
    for item in items:
        groups[next(name for name in groups if name in item.nodeid)].append(item)
    ranks, cuts, project, others = groups.values()
    before = max(0, share - len(ranks))
    items[:] = [*ranks, *others[:before], *cuts, *project, *others[before:]]


@pytest.fixture
def shows(request: pytest.FixtureRequest) -> Shows:
    """Says what the test shows of a model type, for the table of docs/models.md."""
    return lambda model_type, column: request.node.user_properties.append(("status", (model_type, column)))


@pytest.fixture(scope="session", autouse=True)
def _without_flushes() -> Iterator[None]:
    """fsync takes milliseconds of waiting for the disk; only a crash of the machine would show that it is left out.

    A descriptor that is none is an error still, and tests that watch fsync see each call.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="module", autouse=True)
def _fresh_compiler() -> None:
    """Compilations of a file do not depend on those before: sizes that torch has seen change become symbolic, and
    tracing takes five times as long with them."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch"].compiler.reset()


@pytest.fixture(scope="module", autouse=True)
def _few_objects_to_look_through(_fresh_compiler: None) -> None:
    """What outlives a file of tests is mostly modules, classes and caches. Full collections, which some tests and
    libraries ask for, would look through all of it each time: 2.5 s at the end of a run."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of this test are flushed to the disk: it compares times with those of a process that does."""
    monkeypatch.setattr(os, "fsync", FSYNC)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """forks.run(arguments) runs a program without a start of Python: see tests.support.forks."""
    made = Forks()
    yield made
    made.close()

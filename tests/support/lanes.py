"""A pytest plugin: which tests the fast lane (`-m "not slow"`) leaves out beside those with a mark of their own.

Two rules hold for every test function, and no test states them:

- A function that `tests/seconds.json` lists, with the CPU seconds of its longest test, is slow.
- Tests of one function differ by variants, sizes or files. The lane runs a few of them: each value of a parameter that
  has few, and otherwise `FEW`, on the variants `FIRST` before others. The full run has them all.

FNMODELS_UPDATE_SECONDS=1 with any run of tests records their functions in that file: those of which a test lasts longer
than `LONG`, with the processes that it starts.
"""

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

FILE = "tests/seconds.json"
LONG = 1.0  # CPU seconds
FEW = 2  # tests of one function
MANY = 3  # values of a parameter of which not each is tried
FIRST = ("llama", "gpt_oss", "kimi_linear")  # plain; windows, sinks and experts; states, latent keys and experts
PROPERTY = "CPU seconds"  # of the report of a test's end


class Lanes:
    """The plugin: one per process; the main process receives all reports."""

    def __init__(self) -> None:
        self.records = bool(os.environ.get("FNMODELS_UPDATE_SECONDS"))
        self.longest: dict[str, float] = {}  # {function: CPU seconds of its longest test}
        self.began = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not config.option.markexpr:
            return
        long, functions = recorded(config.rootpath), defaultdict(list)
        for item in items:
            functions[function_of(item.nodeid)].append(item)
        for name, tests in functions.items():
            kept = set() if name in long else chosen([parameters_of(test) for test in tests])
            for number in set(range(len(tests))) - kept:
                tests[number].add_marker("slow")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:  # of the process that runs the test: others only hear of its start
        self.began = cpu_seconds() if self.records else 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        if self.records and call.when == "teardown":
            report.user_properties.append((PROPERTY, cpu_seconds() - self.began))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = function_of(report.nodeid)
        for key, seconds in report.user_properties:
            if key == PROPERTY:
                self.longest[name] = max(seconds, self.longest.get(name, 0.0))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.longest and not hasattr(session.config, "workerinput"):
            seconds = recorded(session.config.rootpath) | self.longest
            tests = [name for name in sorted(seconds) if ".py::" in name]  # and no notebooks
            long = {name: round(seconds[name], 1) for name in tests if seconds[name] > LONG}
            (session.config.rootpath / FILE).write_text(json.dumps(long, indent=1) + "\n")


def recorded(root: Path) -> dict[str, float]:
    """{function: CPU seconds of its longest test} of those that last long."""
    path = root / FILE
    return json.loads(path.read_text()) if path.is_file() else {}


def function_of(nodeid: str) -> str:
    """The name of a test without its parameters."""
    return nodeid.partition("[")[0]


def parameters_of(item: pytest.Item) -> Mapping[str, Any]:
    """{name: value} of a test with parameters."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def chosen(tests: Sequence[Mapping[str, Any]]) -> set[int]:
    """The numbers of the tests of a function that the fast lane runs, by their parameters."""
    values = [{(name, key_of(value)) for name, value in test.items()} for test in tests]
    numbers: dict[str, set[Hashable]] = defaultdict(set)
    for name, key in set().union(*values):
        numbers[name].add(key)
    left = {(name, key) for name, keys in numbers.items() if len(keys) <= MANY for key in keys}
    order, kept = _order(tests), list[int]()
    for number in order:
        if values[number] & left:
            kept.append(number)
            left -= values[number]
    return {*kept, *[number for number in order if number not in kept][: max(0, FEW - len(kept))]}


def _order(tests: Sequence[Mapping[str, Any]]) -> list[int]:
    """The numbers of a function's tests: those of the variants `FIRST`, some that lie evenly, and the others."""
    variants = [{getattr(value, "name", None) for value in test.values()} for test in tests]
    first = [number for name in FIRST for number, names in enumerate(variants) if name in names]
    even = [(2 * part + 1) * len(tests) // (2 * FEW) for part in range(FEW)]
    return list(dict.fromkeys((*first, *even, *range(len(tests)))))


def key_of(value: Any) -> Hashable:
    """What equal values of a parameter share."""
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def cpu_seconds() -> float:
    """CPU seconds of this process, of those that it has waited for, and of its descendants that run."""
    ended = os.times()
    return (
        time.process_time() + ended.children_user + ended.children_system + sum(map(_used, _descendants(os.getpid())))
    )


def _descendants(pid: int) -> Iterator[int]:
    """The processes below this one; none where the system does not tell."""
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended since
            for child in map(int, task.read_text().split()):
                yield child
                yield from _descendants(child)


def _used(pid: int) -> float:
    """CPU seconds of a process and of those that it has waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended since
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

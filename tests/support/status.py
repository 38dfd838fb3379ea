"""A pytest plugin that checks the table of model types in docs/models.md against the outcome of a full test run.

A test of a `case` counts for its model type, in the column of its folder or file; a test of a published size says so by
`record_property`. Tests of other places say what they show by the fixture `shows`; "loops" is parity with a written-out
model. All travel with the test's report, so that processes may share the work.
FNMODELS_UPDATE_DOCS=1 writes the table. A run that leaves tests out neither writes it nor fails.
"""

import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Literal

import pytest

PAGE = "docs/models.md"
COLUMNS = {
    "parity": ("tests/parity/",),
    "packing": ("tests/contract/test_packing.py",),
    "transforms": ("tests/contract/test_transforms.py", "tests/contract/test_compile.py"),
    "parallel": ("tests/train/parallel/",),
}
PRESET, CHECKED = "published sizes", "largest config checked"  # names of properties: (model type, parameters)
HEAD = ("model type", "file", *COLUMNS, PRESET, CHECKED)
BEGIN, END = "<!-- status: written by FNMODELS_UPDATE_DOCS=1 make test -->\n", "<!-- /status -->\n"
# {model type of a publisher's dialect: transformers' type of its Configs}
DIALECTS = {"minimax_text_01": "minimax", "minimax_m1": "minimax"}
# Options that leave tests out, as pytest stores them.
NARROWING = ("keyword", "markexpr", "deselect", "ignore_glob", "lf", "stepwise", "collectonly")

Shown = dict[tuple[str, str], list[Any]]
Shows = Callable[[str, Literal["parity", "loops", "parallel"]], None]  # (model type, what the test compares it with)


class Status:
    """The plugin: one per process; the main process receives all reports."""

    def __init__(self) -> None:
        self.shown: Shown = defaultdict(list)  # {(model type, column): outcomes, or numbers of parameters}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        columns = [column for column, places in COLUMNS.items() if case and item.nodeid.startswith(places)]
        item.user_properties += [("status", (case.config.model_type, column)) for column in columns]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        for name, value in report.user_properties:
            if name == "status":
                self.shown[tuple(value)].append(report.outcome)
            elif name in (PRESET, CHECKED) and report.passed:
                model_type, parameters = value
                self.shown[model_type, name].append(parameters)

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if hasattr(session.config, "workerinput") or not is_full(session, exitstatus):
            return
        page = session.config.rootpath / PAGE
        before, after = page.read_text(), with_table(page.read_text(), table(self.shown))
        if before == after:
            return
        if os.environ.get("FNMODELS_UPDATE_DOCS"):
            page.write_text(after)
            return
        report = pytest.TestReport(
            nodeid=f"{PAGE}::status",
            location=(PAGE, None, "status"),
            keywords={},
            outcome="failed",
            longrepr="\n".join(differences(before, after)),
            when="call",
        )
        session.config.hook.pytest_runtest_logreport(report=report)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def is_full(session: pytest.Session, exitstatus: int) -> bool:
    """Whether all tests were selected and have run."""
    config, tests = session.config, session.config.rootpath / "tests"
    asked = [(config.invocation_params.dir / argument).resolve() for argument in config.args]
    ignored = [(config.invocation_params.dir / path).resolve() for path in getattr(config.option, "ignore", None) or ()]
    narrowed = any(getattr(config.option, name, None) for name in NARROWING) or session.shouldfail or session.shouldstop
    narrowed = narrowed or any(tests in (path, *path.parents) for path in ignored)  # notebooks are no rows of the table
    finished = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    return finished and not narrowed and any(path == tests or path in tests.parents for path in asked)


def table(shown: Shown) -> str:
    """A row per model type, also for those without test results."""
    import fnmodels  # here, for workers of xdist start in half the time without it

    lines = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|"]
    for model_type, module in fnmodels.families().items():
        cells = [model_type, f"`{module.replace('.', '/')}.py`"]
        own = DIALECTS.get(model_type, model_type)
        loops = shown.get((own, "loops"), [])
        found = [verdict(shown.get((own, column), [])) for column in COLUMNS]
        cells += ["loops" if verdict(loops) == "yes" and found[0] == "not yet" else found[0], *found[1:]]
        sizes, checked = (sorted(shown.get((own, name), [])) for name in (PRESET, CHECKED))
        cells += [spread(sizes), brief(checked[-1]) if checked else "none"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def verdict(outcomes: list[str]) -> str:
    """ "yes" only where every test passed; a skipped test does not count as passed."""
    if not outcomes:
        return "not yet"
    passed = outcomes.count("passed")
    return "yes" if passed == len(outcomes) else "in part" if passed else "no"


def spread(sizes: list[int]) -> str:
    """The smallest and largest size, and how many there are."""
    if len(sizes) < 2:
        return brief(sizes[0]) if sizes else "none"
    return f"{brief(sizes[0])} to {brief(sizes[-1])} ({len(sizes)})"


def brief(parameters: int) -> str:
    """A number of parameters in three digits, in millions, billions or trillions."""
    size, letter = next((s, n) for s, n in ((1e6, "M"), (1e9, "B"), (1e12, "T")) if parameters < 999.5 * s)
    return f"{parameters / size:.3g}{letter}"


def with_table(page: str, new: str) -> str:
    """The page with the table between its two marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE} needs the lines {BEGIN.strip()!r} and {END.strip()!r} around the table of families.")
    return before + begin + new + end + after


def differences(before: str, after: str) -> list[str]:
    """The message of a failure: the rows that would change."""
    old, new = before.splitlines(), after.splitlines()
    return [
        "The table of model types in docs/models.md does not say what this run showed;",
        "FNMODELS_UPDATE_DOCS=1 make test writes it. The lines that differ:",
        *(f"- {line}" for line in old if line not in new),
        *(f"+ {line}" for line in new if line not in old),
    ]

"""The table of model types in docs/models.md follows the tests: a full run, and only that, fails where they differ."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import fnmodels
from tests.support.forks import ROOT, Forks
from tests.support.status import BEGIN, END, PAGE, brief, spread, table, verdict, with_table

CONFTEST = """
from tests.support.status import Status

def pytest_configure(config):
    config.pluginmanager.register(Status())
"""
PARITY = """
from types import SimpleNamespace
import pytest

CASES = [SimpleNamespace(config=SimpleNamespace(model_type=name)) for name in ("llama", "gpt2")]

@pytest.mark.parametrize("case", CASES)
def test_logits(case):
    assert case.config.model_type != {broken!r}
"""
PACKING = """
from types import SimpleNamespace
import pytest
from tests.support.status import CHECKED, PRESET

@pytest.mark.parametrize("case", [SimpleNamespace(config=SimpleNamespace(model_type="gpt2"))])
def test_packing(case):
    {packing}

def test_sizes(record_property):
    record_property(PRESET, ("llama", 7_000_000_000))
    record_property(PRESET, ("llama", 500_000_000))
    record_property(CHECKED, ("llama", 7_000_000_000))

def test_a_loop(record_property):
    record_property("status", ("qwen3", "loops"))
    record_property("status", ("gpt2", "loops"))
"""


@dataclass(frozen=True)
class Project:
    path: Path
    forks: Forks

    def run_tests(self, *arguments: str) -> pytest.RunResult:
        done = self.forks.run(["-m", "pytest", *arguments], cwd=self.path)
        return pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)


@pytest.fixture
def project(forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """Two files of tests and a page whose table says nothing yet."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("FNMODELS_UPDATE_DOCS", raising=False)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to import than all that is tested here
    for name, text in {
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = ['--import-mode=importlib']\n",
        PAGE: f"Above.\n{BEGIN}{table({})}{END}Below.\n",
        "conftest.py": CONFTEST,
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return write(Project(tmp_path, forks))


def write(project: Project, broken: str = "", packing: str = "pass") -> Project:
    for name, text in {
        "parity/test_logits.py": PARITY.format(broken=broken),
        "contract/test_packing.py": PACKING.format(packing=packing),
    }.items():
        path = project.path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return project


def row(project: Project, model_type: str) -> list[str]:
    text = (project.path / PAGE).read_text()
    assert text.startswith("Above.\n") and text.endswith("Below.\n")
    (cells,) = (line.split(" | ") for line in text.splitlines() if line.startswith(f"| {model_type} |"))
    return [cell.strip(" |") for cell in cells]


def update(project: Project, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setenv("FNMODELS_UPDATE_DOCS", "1")
    project.run_tests(*arguments)
    monkeypatch.delenv("FNMODELS_UPDATE_DOCS")


def test_a_full_run_writes_what_it_showed(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    update(project, monkeypatch, "tests")
    assert row(project, "llama")[2:] == ["yes", "not yet", "not yet", "not yet", "500M to 7B (2)", "7B"]
    assert row(project, "gpt2")[2:] == ["yes", "yes", "not yet", "not yet", "none", "none"]
    assert row(project, "qwen3")[2:] == ["loops", *["not yet"] * 3, "none", "none"]
    project.run_tests("tests").assert_outcomes(passed=5)
    write(project, broken="llama", packing="pytest.skip('no device')")
    update(project, monkeypatch)
    assert row(project, "llama")[2] == "no" and row(project, "gpt2")[2:4] == ["yes", "no"]


def test_a_full_run_fails_where_the_page_says_more_or_less(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    update(project, monkeypatch)
    page = project.path / PAGE
    right = page.read_text()
    for wrong in (right.replace("| yes | yes |", "| yes | not yet |"), right.replace("none | none", "7B | 7B")):
        page.write_text(wrong)
        check_refused(project.run_tests())
        assert page.read_text() == wrong


def test_a_notebook_that_is_ignored_leaves_no_test_out(project: Project) -> None:
    """As `make test` ignores one."""
    check_refused(project.run_tests("--ignore", "examples/one.ipynb"))


@pytest.mark.slow
def test_several_processes_are_one_run(project: Project) -> None:
    result = project.run_tests("-p", "xdist", "-n", "2")
    check_refused(result)
    result.stdout.fnmatch_lines(["+ | llama | * | yes | not yet | not yet | not yet | 500M to 7B (2) | 7B |"])


def check_refused(result: pytest.RunResult) -> None:
    result.assert_outcomes(passed=5, failed=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*table of model types in docs/models.md does not say*"])
    result.stdout.fnmatch_lines([f"FAILED {PAGE}::status*"])


def test_a_run_of_some_tests_neither_writes_nor_fails(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (project.path / PAGE).read_text()
    for narrow in (("-k", "logits"), ("--ignore", "tests/parity"), ("--co",)):
        result = project.run_tests(*narrow)
        assert result.ret == pytest.ExitCode.OK, narrow
    update(project, monkeypatch, "tests/parity")
    assert (project.path / PAGE).read_text() == before
    write(project, broken="llama")
    update(project, monkeypatch, "-x")
    assert (project.path / PAGE).read_text() == before


def test_cells() -> None:
    assert verdict([]) == "not yet" and verdict(["passed"] * 3) == "yes"
    assert verdict(["passed", "skipped"]) == verdict(["passed", "failed"]) == "in part" and verdict(["failed"]) == "no"
    assert [brief(n) for n in (70_426_624, 999_885_952, 405_853_388_800)] == ["70.4M", "1B", "406B"]
    assert brief(1_026_408_232_448) == "1.03T"
    assert spread([]) == "none" and spread([7_241_732_096]) == "7.24B"


def test_the_table_needs_its_place() -> None:
    assert with_table(f"a\n{BEGIN}old\n{END}b\n", "new\n") == f"a\n{BEGIN}new\n{END}b\n"
    with pytest.raises(ValueError, match=re.escape(repr(END.strip()))):
        with_table(f"a\n{BEGIN}b\n", "new\n")


def test_every_model_type_has_its_row() -> None:
    """Before a full run says what it holds."""
    rows = {
        cells[1].strip(): cells[2]
        for line in (ROOT / PAGE).read_text().partition(END)[0].splitlines()
        if len(cells := line.split("|")) > 3
    }
    for model_type, module in fnmodels.families().items():
        assert rows[model_type].strip() == f"`{module.replace('.', '/')}.py`"

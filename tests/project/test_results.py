"""Pages of results are made from the JSON beside them, say how they were measured, and have little prose."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.prose import blocks

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAGES = sorted((BENCHMARKS / "results").glob("*.md"))
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST = 300  # words outside of tables, code and headings

PRINTED = """
torch 2.13
One block, float32: target 1.00

| | median | x |
|---|---:|---:|
| ours | 1 ms | 2.00 |
compiling
| theirs | 2 ms | 1.00 |

### One block, bfloat16
| | median | x |
|---|---:|---:|
| ours | 3 ms | 1.00 |

| who | MiB |
|---|---|
| ours | 5 |
| no | row | of it |
"""


@pytest.fixture(scope="module")
def record() -> ModuleType:
    """benchmarks/record.py as a module."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import record
    finally:
        sys.path.remove(str(BENCHMARKS))
    return record


def words(markdown: str) -> int:
    return sum(len(block.text.split()) for block in blocks(markdown) if block.kind == "text")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_that_of_its_json_and_says_how_it_was_measured(path: Path, record: ModuleType) -> None:
    told = path.with_suffix(".json")
    assert told.exists(), f"write {path.name} by `python benchmarks/record.py {path.stem}.py`"
    run = record.read(told)
    assert path.read_text().startswith(record.page(run).removesuffix("\n")), "run `python benchmarks/record.py --pages`"
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", run.date) and run.commit and run.cpu_flags
    assert f"benchmarks/{run.script}" in run.command and (BENCHMARKS / run.script).exists()
    headers = [table.columns for table in run.tables]
    assert len(headers) == len(set(headers)) > 0  # those of the same columns are one table


@pytest.mark.parametrize(
    "path", sorted(BENCHMARKS.rglob("*.md")), ids=lambda path: path.relative_to(BENCHMARKS).as_posix()
)
def test_a_page_of_results_has_at_most_three_hundred_words_beside_its_tables(path: Path) -> None:
    assert words(path.read_text()) <= MOST


def test_guides_name_thirteen_scripts_at_most_and_each_has_its_results() -> None:
    named = {name for page in GUIDES for name in re.findall(r"benchmarks/(\w+)\.py", page.read_text())}
    named -= {"record", "short"}
    table = re.findall(
        r"^\| `(\w+)\.py` .*\(results/(\w+)\.md\) \|$", (BENCHMARKS / "README.md").read_text(), re.MULTILINE
    )
    assert named == {script for script, _ in table} == {page for _, page in table} == {path.stem for path in PAGES}
    assert len(named) <= 13


def test_every_script_for_one_subject_has_a_row() -> None:
    rows = set(re.findall(r"^\| `(\w+)\.py` \| [^|]+ \|$", (BENCHMARKS / "README.md").read_text(), re.MULTILINE))
    assert rows == {path.stem for path in (BENCHMARKS / "dev").glob("*.py")} - {"above"}


def test_tables_are_read_of_what_a_script_prints_and_those_alike_are_joined(record: ModuleType) -> None:
    found = record.tables(PRINTED)
    assert [(table.title, len(table.rows)) for table in found] == [
        ("One block, float32: target 1.00", 2),
        ("One block, bfloat16", 1),
        ("", 1),
    ]
    blocks_of_both, memory = record.joined(found)
    assert blocks_of_both.columns == ("of", "", "median", "x") and len(blocks_of_both.rows) == 3
    assert blocks_of_both.rows[1] == ("One block, float32: target 1.00", "theirs", "2 ms", "1.00")
    assert memory.rows == (("ours", "5"),)


@pytest.mark.parametrize(("name", "expected"), [("train_step", 1.72), ("load", 304 / 183), ("parallel", 1 / 0.84)])
def test_a_bar_of_the_short_set_is_read_from_the_tables_of_its_script(
    record: ModuleType, name: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import short

    run = record.read(BENCHMARKS / "results" / f"{name}.json")
    tables = list(run.tables)
    if name == "parallel":  # the page has both numbers of processes, the short set one
        (table,) = tables
        tables = [record.Table("", table.columns, tuple(row for row in table.rows if row[0] == "two processes"))]
    assert round(short.FIGURES[name].ratio(tables), 6) == round(expected, 6)


def test_a_new_run_keeps_the_notes_of_the_page(record: ModuleType, tmp_path: Path) -> None:
    old = record.read(BENCHMARKS / "results" / "moe.json")
    record.write(old, tmp_path)
    page = tmp_path / "moe.md"
    assert record.read(tmp_path / "moe.json") == old and page.read_text() == record.page(old)
    page.write_text(page.read_text() + "\nBy hand.\n")
    record.write(record.Record(**(vars(old) | {"date": "2030-01-01"})), tmp_path)
    text = page.read_text()
    assert "2030-01-01" in text and old.date not in text and text.endswith("\nBy hand.\n")


def test_a_script_that_fails_or_takes_too_long_is_named(
    record: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "HERE", tmp_path)
    (tmp_path / "silent.py").write_text("print('nothing')")
    (tmp_path / "slow.py").write_text("import time; print('| a |\\n|---|\\n| 1 |', flush=True); time.sleep(60)")
    with pytest.raises(RuntimeError, match=r"benchmarks/silent.py ended with exit code 0 and printed no table"):
        record.run("silent.py", [])
    with pytest.raises(RuntimeError, match=r"benchmarks/slow.py was stopped after 1 s"):
        record.run("slow.py", [], limit=1)

"""The Python blocks of the pages that promise it run as they stand, top to bottom, and print what the page says."""

import contextlib
import importlib
import io
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.traced import without_generated_code

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    "adding-a-loss.md",
    "adding-a-parallelism.md",
    "adding-an-optimizer.md",
    "architecture.md",
    pytest.param("coming-from-jax.md", marks=pytest.mark.slow),
    "conversations.md",
    "curvature.md",
    "data.md",
    "diffusion.md",
    "embeddings.md",
    "engine.md",
    "environments.md",
    "evaluation.md",
    "first-hour.md",
    "generation.md",
    "images-and-audio.md",
    "interpretability.md",
    "lora.md",
    "losses-of-layers.md",
    "losses.md",
    pytest.param("own-model.md", marks=pytest.mark.slow),
    "parallel.md",
    "saving.md",
    pytest.param("server.md", marks=pytest.mark.skipif(find_spec("uvicorn") is None, reason="the extra `serve`")),
    "steps.md",
    "testing.md",
    "training.md",
    pytest.param("transforms.md", marks=pytest.mark.slow),
]


def blocks_of(page: str) -> list[tuple[str, str | None]]:
    """The source of each block of Python, and the block of text that follows it, which is what it prints."""
    text = (DOCS / page).read_text()
    found = re.finditer(r"^```python\n(.*?)^```\n(?:\n^```text\n(.*?)^```\n)?", text, re.MULTILINE | re.DOTALL)
    # blank lines before it, so that a traceback gives the page's own line numbers
    return [("\n" * text[: block.start(1)].count("\n") + block[1], block[2]) for block in found]


def file_of(page: str, source: str) -> str | None:
    """The file as which the page says to save the block: `<!-- NAME.py -->` stands before it."""
    before = (DOCS / page).read_text().splitlines()[source.count("\n") - source.lstrip("\n").count("\n") - 2]
    named = re.fullmatch(r"<!-- (\w+\.py) -->", before)
    return named[1] if named else None


def run(page: str, source: str, names: dict[str, Any]) -> str:
    """What it prints, but for how large differences are, which is not the same on all machines."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(source, str(DOCS / page), "exec"), names)
    return _without_sizes(printed.getvalue())


def _without_sizes(printed: str) -> str:
    return re.sub(r" \(largest difference .*\)$", "", printed, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_blocks_run_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a page of graphs their operations one by one; blocks that import jax, which is optional, where it is there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    module = ModuleType("page")  # the compiler looks up the globals of a function in the module that it names
    monkeypatch.setitem(sys.modules, "page", module)
    blocks = blocks_of(page)
    assert len(blocks) == (DOCS / page).read_text().count("```python\n") > 0
    monkeypatch.syspath_prepend(tmp_path)
    with without_generated_code() if page == "coming-from-jax.md" else contextlib.nullcontext():
        for source, wanted in blocks:
            if name := file_of(page, source):
                (tmp_path / name).write_text(source.lstrip("\n"))
                continue
            if "import jax" in source and find_spec("jax") is None:
                continue
            printed = run(page, source, module.__dict__)
            assert wanted is None or printed == _without_sizes(wanted)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_files_and_pages_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(
        r"\b((?:fnmodels|params|train|tests|examples|benchmarks|docs)/[\w./]+\.(?:py|md|json|ipynb))", text
    )
    named += [f"docs/{name}" for name in re.findall(r"\]\((\w[\w-]*\.md)", text)]
    absent = [name for name in named if not (ROOT / name).exists() and "NAME" not in name]
    assert not absent


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_names_with_dots_that_are_written_out_exist(page: Path) -> None:
    optional = {"train.eval.harness.Checkpoint"}  # its module needs the extra `eval`
    for name in set(re.findall(r"`((?:fnmodels|train|params|P)\.[\w.]*\w)", page.read_text())) - optional:
        package, *rest = name.split(".")
        found: Any = importlib.import_module("params" if package == "P" else package)
        for attribute in rest:
            if not hasattr(found, attribute):  # a module that is not imported yet
                assert isinstance(found, ModuleType), name
                importlib.import_module(f"{found.__name__}.{attribute}")
            found = getattr(found, attribute)


def test_the_page_of_checks_shows_five_bugs_and_names_every_check() -> None:
    from fnmodels import testing

    said = [wanted for _, wanted in blocks_of("testing.md") if wanted is not None]
    assert len(said) == 5 and all(said)
    rows = set(re.findall(r"^\| `(check_\w+)` \|", (DOCS / "testing.md").read_text(), re.MULTILINE))
    assert rows == {check.__name__ for check in testing.CHECKS}

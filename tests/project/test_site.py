"""The documentation site: every public name and page is in it, notebooks show what they printed, and it builds."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fnmodels
from tests.support.docstrings import PACKAGES, reference, resolve

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
WITHOUT_PICTURES = {"chat.ipynb"}


def test_every_public_name_has_a_place_in_the_reference() -> None:
    names = reference()
    assert len(names) == len(set(names)) > 150
    shown = [resolve(name) for name in names]
    for package in PACKAGES:
        module = importlib.import_module(package)
        absent = [name for name in module.__all__ if not any(getattr(module, name) is found for found in shown)]
        assert not absent, f"{package}: {absent} are on no page of docs/api"


@pytest.mark.parametrize("package", ["fnmodels", "params", "train"])
def test_flat_names_are_few_and_each_is_there(package: str) -> None:
    module = importlib.import_module(package)
    names = module.__all__
    assert len(names) == len(set(names)) <= 60, f"{package} has {len(names)} flat names: name new ones in a submodule"
    assert [name for name in names if not hasattr(module, name)] == []


def test_every_page_and_notebook_is_in_the_navigation() -> None:
    listed = re.findall(r"\S+\.(?:md|ipynb)$", (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1], re.MULTILINE)
    pages = [path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")]
    notebooks = [f"examples/{path.name}" for path in NOTEBOOKS]
    generated = ["index.md", "security.md", "contributing.md", "changelog.md"]
    assert sorted(listed) == sorted([*pages, *generated, *notebooks])
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    assert {path.name for path in NOTEBOOKS} == set(re.findall(r"\]\(\.\./examples/(\S+)\)", gallery))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_outputs_are_those_of_one_run_without_warnings_or_paths(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run `make notebooks`"
    assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in outputs)
    texts = ["".join(output.get("text", [])) + str(output.get("data", {}).get("text/plain", "")) for output in outputs]
    assert not [text for text in texts if re.search(r"(?<!\w)/(work|tmp|home|root|usr|Users)/", text)]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert pictures or path.name in WITHOUT_PICTURES
    assert path.stat().st_size < 600_000


QUESTIONS = {
    "how to resume": "saving",
    "load a checkpoint": "checkpoints",
    "generate text": "generation",
    "train on my own text": "main-job",
    "train on conversations": "conversations",
    "pack documents": "positions-and-masks",
    "train on two GPUs": "parallel",
    "add a model": "adding-a-family",
    "supported models": "models",
    "write a loss": "adding-a-loss",
    "custom optimizer": "adding-an-optimizer",
    "LoRA": "lora",
    "quantized": "quantized",
    "export to Hugging Face": "checkpoints",
    "make_step": "api/train",
    "load_pretrained": "api/params",
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_end_with_a_cell_for_the_readers_checkpoint(path: Path) -> None:
    *_, heading, last = json.loads(path.read_text())["cells"]
    assert "## Your own checkpoint" in "".join(heading["source"])
    assert re.search(r"^checkpoint = None  # such as .+\nif checkpoint:\n", "".join(last["source"]), re.MULTILINE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for module in ("mkdocs", "material", "mkdocstrings_handlers.python", "mkdocs_jupyter"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_strictly_and_shows_every_name_and_picture(site: Path) -> None:
    pages = "".join(page.read_text() for page in (site / "api").rglob("index.html"))
    assert not [name for name in reference() if f'id="{name}"' not in pages]
    for path in NOTEBOOKS:
        text = (site / "examples" / path.stem / "index.html").read_text()
        assert path.name in WITHOUT_PICTURES or "data:image/png;base64," in text
        assert (
            path.name in WITHOUT_PICTURES or (site / "assets" / "gallery" / f"{path.stem}.png").stat().st_size < 99_000
        )
    assert f"fnmodels {fnmodels.__version__}" in (site / "index.html").read_text()


@pytest.mark.slow
def test_entries_of_the_reference_have_rows_with_real_defaults_and_links_to_their_lines(site: Path) -> None:
    pages = [page.read_text() for page in (site / "api").rglob("index.html")]
    assert sum(page.count('<span class="doc-section-title">Parameters:</span>') for page in pages) > 300
    assert sum(page.count('<span class="doc-section-title">Returns:</span>') for page in pages) > 250
    assert not [page for page in pages if '<span class="o">=</span> <span class="o">...</span>' in page]
    links = {link for page in pages for link in re.findall(r'href="\.\./\.\./(source/[^"]+)"', page)}
    assert len(links) > 300
    sources = {link.partition("#")[0] for link in links}
    lines = {source: (site / source / "index.html").read_text() for source in sources}
    assert not [link for link in links if f'id="{link.partition("#")[2]}"' not in lines[link.partition("#")[0]]]


@pytest.mark.slow
def test_the_search_finds_the_right_page_first_by_a_wide_margin(site: Path) -> None:
    pytest.importorskip("lunr")
    from tests.support.site_search import SiteSearch

    search = SiteSearch(site)
    answers = {question: list(search.pages(question).items())[:2] for question in QUESTIONS}
    assert {question: first for question, ((first, _), _) in answers.items()} == QUESTIONS
    margins = {question: best / second for question, ((_, best), (_, second)) in answers.items()}
    close = {question: (answers[question], margin) for question, margin in margins.items() if margin < 2}
    assert not close, f"Name words of these pages in docs/hooks.py, so that changes of a text do not move them: {close}"

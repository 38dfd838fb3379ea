"""Hooks of mkdocs: pages of the site that lie elsewhere in the repository, or are made from it.

README.md is the first page, and the notebooks of examples/ are pages. Links between files of the repository are
rewritten to the site's addresses; those to source files stay plain text. The reference links to source/, a page for
each module in which a documented name is defined. The gallery has a picture of each notebook, from its outputs.
"""

import base64
import importlib
import inspect
import io
import json
import re
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from PIL import Image

import fnmodels

ROOT = Path(__file__).parents[1]
PAGES = {name: name.upper().replace(".MD", ".md") for name in ("security.md", "contributing.md", "changelog.md")}
PAGES["index.md"] = "README.md"
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
THUMBNAIL = (480, 300)  # pixels, twice what a card shows
# Words under which the search of the site puts a page first. Pages that are not named have the titles and text alone.
# Every word of a query is a beginning: "model" finds "models" too, and "a" and "to" whatever begins with them, so that
# "agent" or "tools" here would answer "write a loss" and "how to resume".
SEARCH_WORDS = {
    "adding-a-family.md": ["model", "family"],
    "adding-a-loss.md": ["loss"],
    "adding-an-optimizer.md": ["optimizer"],
    "checkpoints.md": ["load", "checkpoint", "export", "hugging", "face"],
    "conversations.md": ["conversations", "chat"],
    "data.md": ["data", "jsonl", "parquet", "stream"],
    "engine.md": ["rl", "engine"],
    "environments.md": ["environment", "grpo", "multi-turn"],
    "evaluation.md": ["evaluate", "evaluation"],
    "generation.md": ["generate", "sample", "sampling", "text", "cache"],
    "lora.md": ["lora", "peft", "finetune", "fine-tune"],
    "losses.md": ["distill", "distillation"],
    "main-job.md": ["train", "text", "settings", "fnmodels-train"],
    "models.md": ["supported", "types"],
    "parallel.md": ["two", "gpus", "distributed", "mesh", "fsdp"],
    "positions-and-masks.md": ["pack", "packing", "documents", "mask"],
    "quantized.md": ["quantized", "quantization", "gguf"],
    "reports.md": ["metrics", "diverged"],
    "saving.md": ["save", "resume"],
    "steps.md": ["compile", "remat", "memory"],
}
# Factors of the scores of pages in the search: guides come before the many short entries of the reference.
SEARCH_BOOSTS = {"api/tinker.md": 0.02, "api/": 0.2, "examples/": 0.3}
SOURCE_PAGE = """---
title: {name}
search:
  exclude: true
---
# `{name}`

~~~~~~ {{.python linenums="1"}}
{text}
~~~~~~
"""


def on_config(config: Any) -> Any:
    config.site_name = f"fnmodels {fnmodels.__version__}"
    return config


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: Any) -> Files:
    for page, name in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    pictures = re.findall(r'src="(?!docs/)([^":]+)"', (ROOT / "README.md").read_text())
    for name in [*pictures, *(f"examples/{path.name}" for path in NOTEBOOKS)]:
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    for path in documented_files():
        name = path.relative_to(ROOT).as_posix()
        content = SOURCE_PAGE.format(name=name, text=path.read_text())
        files.append(File.generated(config, f"source/{name.removesuffix('.py')}.md", content=content))
    for path in NOTEBOOKS:
        if picture := thumbnail(path):
            files.append(File.generated(config, f"assets/gallery/{path.stem}.png", content=picture))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The text with links that hold on the site: README.md lies a folder above docs/, and examples/ beside it."""
    name = page.file.src_uri
    if name.startswith("source/"):
        return markdown
    if name in SEARCH_WORDS:
        page.meta["tags"] = SEARCH_WORDS[name]
    for beginning, boost in SEARCH_BOOSTS.items():
        if name.startswith(beginning):
            page.meta.setdefault("search", {"boost": boost})
    if name in PAGES:
        markdown = re.sub(r'(\]\(|src=")docs/', r"\1", markdown)
        markdown = re.sub(r"\[([^]]+)\]\((?:tests/README.md|CITATION.cff|benchmarks/[\w/]+\.md)\)", r"`\1`", markdown)
    for address, file in PAGES.items():
        markdown = re.sub(rf"\]\((\.\./)?{file}", f"]({address}", markdown)
    markdown = re.sub(r"\[[^]]+\]\(\.\./(benchmarks/[\w/]+\.md)\)", r"`\1`", markdown)  # no pages of the site
    if name == "gallery.md":
        markdown = cards(markdown, files)
    return markdown.replace("](../examples/", "](examples/")


def documented_files() -> list[Path]:
    """The modules that define what the reference shows."""
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    found = {inspect.getsourcefile(value) for name in re.findall(r"^::: ([\w.]+)$", pages, re.M) for value in of(name)}
    return sorted(Path(name) for name in found if name is not None and Path(name).is_relative_to(ROOT))


def of(name: str) -> Iterator[Any]:
    """The function or class of a dotted name; of a module all those that its public names have."""
    first, *rest = name.split(".")
    value = reduce(attribute, rest, importlib.import_module(first))
    if isinstance(value, ModuleType):
        yield value
        members = (getattr(value, name) for name in getattr(value, "__all__", dir(value)) if not name.startswith("_"))
        yield from (inspect.unwrap(m) for m in members if inspect.isclass(m) or inspect.isfunction(m))
    elif inspect.isclass(value) or inspect.isfunction(value):
        yield inspect.unwrap(value)


def attribute(value: Any, name: str) -> Any:
    """The attribute of an object, or a module that its package does not import."""
    return getattr(value, name) if hasattr(value, name) else importlib.import_module(f"{value.__name__}.{name}")


def thumbnail(path: Path) -> bytes | None:
    """The largest picture among the outputs of a notebook, made small; None without pictures."""
    cells = json.loads(path.read_text())["cells"]
    outputs = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
    pictures = [base64.b64decode("".join(data["image/png"])) for data in outputs if "image/png" in data]
    if not pictures:
        return None
    with Image.open(io.BytesIO(max(pictures, key=len))) as picture, io.BytesIO() as small:
        picture.thumbnail(THUMBNAIL)
        picture.convert("RGB").quantize(64).save(small, "png", optimize=True)
        return small.getvalue()


def cards(markdown: str, files: Files) -> str:
    """The gallery's table of notebooks as cards with pictures."""
    rows = re.findall(r"^\| \[([^]]+)\]\(\.\./examples/(\w+)\.ipynb\) \| (.*) \|$", markdown, re.MULTILINE)
    table = re.search(r"^\| notebook \|(?:.*\|\n)+", markdown, re.MULTILINE)
    assert table and rows, "docs/gallery.md has no table of notebooks"
    listed = []
    for title, stem, text in rows:
        address = f"assets/gallery/{stem}.png"
        picture = (
            f"[![{title}]({address})](../examples/{stem}.ipynb)\n\n    " if files.get_file_from_path(address) else ""
        )
        listed.append(f"-   {picture}**[{title}](../examples/{stem}.ipynb)**\n\n    {text}\n")
    return markdown.replace(
        table[0], '<div class="grid cards gallery" markdown>\n\n' + "\n".join(listed) + "\n</div>\n"
    )

"""Hooks of mkdocs: README.md is the first page of the site, and the notebooks of examples/ are pages of it.

Links between files of the repository are rewritten to the site's addresses; those to source files stay plain text.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {name: name.upper().replace(".MD", ".md") for name in ("security.md", "contributing.md", "changelog.md")}
PAGES["index.md"] = "README.md"
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def on_files(files: Files, config: Any) -> Files:
    for page, name in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / name)))
    pictures = re.findall(r'src="(?!docs/)([^":]+)"', (ROOT / "README.md").read_text())
    for name in [*pictures, *(f"examples/{path.name}" for path in NOTEBOOKS)]:
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The text with links that hold on the site: README.md lies a folder above docs/, and examples/ beside it."""
    if page.file.src_uri in PAGES:
        markdown = re.sub(r'(\]\(|src=")docs/', r"\1", markdown)
        markdown = re.sub(
            r"\[([^]]+)\]\((?:tests/README.md|CITATION.cff|benchmarks/results/\w+\.md)\)", r"`\1`", markdown
        )
    for address, name in PAGES.items():
        markdown = re.sub(rf"\]\((\.\./)?{name}", f"]({address}", markdown)
    markdown = re.sub(r"\[[^]]+\]\(\.\./(benchmarks/[\w/]+\.md)\)", r"`\1`", markdown)  # no pages of the site
    return markdown.replace("](../examples/", "](examples/")

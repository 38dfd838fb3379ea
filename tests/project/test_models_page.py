"""docs/models.md says what the models of each type are called: the names of its presets."""

import os
from collections import defaultdict
from pathlib import Path

import fnmodels

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- names: written by FNMODELS_UPDATE_DOCS=1 pytest tests/project/test_models_page.py -->\n"
END = "<!-- /names -->\n"


def names_of_types() -> str:
    """A row per model type with a preset: the type and the names of its presets, in order."""
    names: dict[str, list[str]] = defaultdict(list)
    for name in fnmodels.presets():
        names[fnmodels.preset(name).model_type].append(name)
    rows = [f"| {model_type} | {', '.join(names[model_type])} |\n" for model_type in sorted(names)]
    return "| model type | published models |\n|---|---|\n" + "".join(rows)


def test_every_preset_stands_beside_its_type() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"docs/models.md needs the lines {BEGIN!r} and {END!r}"
    page = before + BEGIN + names_of_types() + END + after
    if os.environ.get("FNMODELS_UPDATE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "FNMODELS_UPDATE_DOCS=1 pytest tests/project/test_models_page.py writes the table"

"""docs/models.md says what the models of each type are called: its presets, or names on the Hub."""

import os
from collections import defaultdict
from pathlib import Path

import fnmodels
from fnmodels.models.common.registry import every_model, towers
from tests.params.checkpoint.test_wrapped_text import WRAPPERS
from tests.support.cases import cases
from tests.support.hub_names import HUB, PARTS, whole_of

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN = "<!-- names: written by FNMODELS_UPDATE_DOCS=1 pytest tests/project/test_models_page.py -->\n"
END = "<!-- /names -->\n"


def presets_of_types() -> dict[str, list[str]]:
    """{model type: the names of its presets, in order}."""
    names: dict[str, list[str]] = defaultdict(list)
    for name in fnmodels.presets():
        names[fnmodels.preset(name).model_type].append(name)
    return dict(names)


def texts_alone() -> list[str]:
    """The types that wrap a text, of which no more is read."""
    wrappers = {case.config.model_type for case in cases() if "text_config" in case.config.to_hf()}
    return sorted(wrappers - towers().keys())


def names_of_types() -> str:
    """A row per model type that is read: its presets; names on the Hub where it has none, or what it is a part of."""
    known, presets, alone, rows = every_model(), presets_of_types(), texts_alone(), []
    for model_type in sorted(known):
        beside = HUB.get(model_type, "") or whole_of(model_type, set(known))
        if model_type in alone:
            beside += " (the text alone is read)" if beside else "the text alone is read"
        rows.append(f"| {model_type} | {', '.join(presets.get(model_type, ()))} | {beside} |\n")
    head = "| model type | presets | repository without a preset, or the whole |\n|---|---|---|\n"
    others = "\n".join(f"| {wrapper} | {text} |" for wrapper, text in sorted(WRAPPERS.items()))
    below = 'Types of which `part="text"` reads the text, and nothing else is read:'
    below += "\n\n| model type | usual text |\n|---|---|\n"
    return f"{head}{''.join(rows)}\n{below}{others}\n"


def test_every_type_stands_beside_its_names() -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert end, f"docs/models.md needs the lines {BEGIN!r} and {END!r}"
    page = before + BEGIN + names_of_types() + END + after
    if os.environ.get("FNMODELS_UPDATE_DOCS"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page, "FNMODELS_UPDATE_DOCS=1 pytest tests/project/test_models_page.py writes the table"


def test_every_type_that_is_read_has_a_name() -> None:
    known = set(every_model())
    parts = {model_type for model_type in known if whole_of(model_type, known)}
    missing = known - presets_of_types().keys() - HUB.keys() - parts
    assert not missing, f"HUB in tests/support/hub_names.py needs what models of these types are called: {missing}."


def test_names_on_the_hub_are_of_types_without_a_preset() -> None:
    assert not HUB.keys() & presets_of_types().keys(), "these have a preset, whose name is enough"
    assert set(every_model()) >= HUB.keys() | PARTS.keys(), "these types are not read"


def test_a_type_whose_text_alone_is_read_says_so() -> None:
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in names_of_types().splitlines()}
    assert {"gemma3n", "kimi_k3"} <= set(texts_alone()) and not {"qwen3_5", "llama"} & set(texts_alone())
    assert [kind for kind, row in rows.items() if "the text alone is read" in row] == texts_alone()

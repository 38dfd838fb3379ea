"""Which model types a test is of, by its parameters: what `-k MODEL_TYPE` selects."""

import functools
from collections.abc import Mapping
from typing import Any

import fnmodels
from fnmodels.models.common.registry import model_type_of
from fnmodels.models.presets import published


def model_types_of(parameters: Mapping[str, Any]) -> set[str]:
    """Those of a Case or a Config, of a preset's name, of a family's name."""
    found: set[str] = set()
    for value in parameters.values():
        config = getattr(value, "config", value)
        if isinstance(model_type := getattr(config, "model_type", None), str):
            found.add(model_type)
        if isinstance(value, str):
            found |= _named().get(value, frozenset())
    return found


@functools.cache
def _named() -> dict[str, frozenset[str]]:
    """{name of a preset or of a family: its model types}."""
    types = fnmodels.families()
    names = {name: frozenset({model_type_of(values)}) for name, values in published().items()}
    files = {module.rpartition(".")[2] for module in types.values()}
    return {file: frozenset(t for t, m in types.items() if m.endswith(f".{file}")) for file in files} | names

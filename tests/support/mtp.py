"""The variants of models with MTP heads, found by asking every family that says it has some."""

import dataclasses
import functools
from typing import Any

import fnmodels
from fnmodels.errors import ConfigError, UnsupportedError
from fnmodels.models.common.family import traits_of
from tests.support.cases import Case, cases, structure


def with_heads(config: Any, heads: int) -> Any:
    """The config with so many MTP heads, and as many as it may have where it may have fewer."""
    return dataclasses.replace(config, num_nextn_predict_layers=min(heads, _most(config, heads)))


def _most(config: Any, heads: int) -> int:
    for number in range(heads, 0, -1):
        try:
            made = dataclasses.replace(config, num_nextn_predict_layers=number)
            if type(config).from_hf(made.to_hf()) == made:
                return number
        except (ConfigError, UnsupportedError):
            continue
    return 0


@functools.cache
def mtp_cases() -> tuple[Case, ...]:
    """Of each model type whose config.json may count MTP heads, the variant with the most kinds of layers, and then the
    fewest layers; one of types of one structure, as those of a text and of its wrapper."""
    found: dict[tuple[str, str], list[Case]] = {}
    for case in cases():
        optional = traits_of(fnmodels.family_of(case.config)).optional
        if "mtp" in optional and _most(case.config, 1):
            found.setdefault((case.family, case.config.model_type), []).append(case)
    richest = [max(group, key=_richness) for group in found.values()]
    return tuple({structure(case): case for case in reversed(richest)}.values())[::-1]


def _richness(case: Case) -> tuple[int, int]:
    kinds = fnmodels.family_of(case.config).kinds(case.config)
    return len(set(kinds)), -len(kinds)

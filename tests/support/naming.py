"""A few models that have between them all names of parameters, on disk or in memory, or all other parts."""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

T = TypeVar("T")


def covering_names(models: Sequence[T], names: Callable[[T], Mapping[str, Any]]) -> list[T]:
    """For tests that treat each parameter by its path and its stored name, whatever else the model is.

    Args:
        models: Cases.
        names: case -> {path: where it is stored}, as `hf_names` or `module_names`.

    Returns:
        Some of the models, each with a pair of path and stored name that those before it lack; numbers of layers and
        experts are no part of a name.
    """
    return fewest({model: pairs_of(names(model)) for model in models})


def pairs_of(names: Mapping[str, Any]) -> set[str]:
    """The path and the stored name of each parameter, without numbers of layers and experts."""
    return {re.sub(r"\d+", "#", f"{path} {stored}") for path, stored in names.items()}


def fewest(parts: Mapping[T, Set[str]], cost: Callable[[T], float] = lambda _: 1.0) -> list[T]:
    """Few of the models that have all parts between them: in turn the one with the most parts that are missing.

    cost: of a test on a model: parts are counted by it, so that two small models may stand for a large one. Those whose
    parts others have between them are left out at the end, the largest first.
    """
    left, found = set[str]().union(*parts.values()), list[T]()
    while left:
        found.append(max(parts, key=lambda model: len(parts[model] & left) / cost(model)))
        left -= parts[found[-1]]
    for model in sorted(found, key=cost, reverse=True):
        others = [other for other in found if other is not model]
        if parts[model] <= set[str]().union(*(parts[other] for other in others)):
            found = others
    return found

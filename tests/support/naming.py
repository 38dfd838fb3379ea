"""A few models whose names of parameters on disk, or in transformers' memory, are those of all models between them."""

import re
from collections.abc import Callable, Mapping, Sequence
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
    pairs = {model: {_unnumbered(f"{path} {stored}") for path, stored in names(model).items()} for model in models}
    left, found = set[str]().union(*pairs.values()), list[T]()
    while left:
        found.append(max(pairs, key=lambda model: len(pairs[model] & left)))
        left -= pairs[found[-1]]
    return found


def _unnumbered(text: str) -> str:
    return re.sub(r"\d+", "#", text)

"""Finding the family of a configuration or of a Hugging Face model type.

Nothing is registered: families are the modules of this folder that say which MODEL_TYPES they read, and any user's
module that defines a Config with the functions beside it.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType
from typing import Any

from fnmodels.errors import UnsupportedError

_PACKAGE = "fnmodels.models"


def family_of(config: Any) -> ModuleType:
    """The module that defines `type(config)`: it holds the spec, the block and the rest."""
    module = sys.modules[type(config).__module__]
    if not hasattr(module, "block"):
        raise TypeError(
            f"{type(config).__module__}, which defines {type(config).__name__}, has no function `block`; "
            "a family's functions stand in the module of its Config."
        )
    return module


def families() -> dict[str, str]:
    """{Hugging Face model type: family module} of everything in the folder."""
    found = {}
    for info in pkgutil.iter_modules(importlib.import_module(_PACKAGE).__path__, f"{_PACKAGE}."):
        if not info.ispkg:
            for model_type in getattr(importlib.import_module(info.name), "MODEL_TYPES", ()):
                found[model_type] = info.name
    return dict(sorted(found.items()))


def family_for(model_type: str) -> ModuleType:
    """The family that reads checkpoints of `model_type`; UnsupportedError names those that can be read."""
    known = families()
    if model_type not in known:
        raise UnsupportedError(f"The model type {model_type!r} is not supported; supported are {', '.join(known)}.")
    return importlib.import_module(known[model_type])

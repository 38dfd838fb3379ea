"""Functions of the user's own by their import path: `module:name`, or `FILE.py:name`.

Import paths run code, so that only the command line may give them: neither a settings file nor a run folder, which may
be a stranger's.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from params.imported import imported_module

_FORM = re.compile(r"(?P<where>.*[^:]):(?P<name>[A-Za-z_]\w*)")


def is_import_path(value: object) -> bool:
    """Whether a setting's value is `module:name` or `FILE.py:name`."""
    match = _FORM.fullmatch(value) if type(value) is str else None
    where = match["where"] if match else ""
    return where.endswith(".py") or re.fullmatch(r"\w+(\.\w+)*", where) is not None


def is_module(value: object) -> bool:
    """Whether a setting's value is `module` or `FILE.py`."""
    return type(value) is str and (value.endswith(".py") or re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", value) is not None)


def absolute(value: str, base: Path) -> str:
    """The import path with its file, if it has one, resolved against `base`."""
    where, _, name = value.rpartition(":")
    return f"{os.path.realpath(base / where)}:{name}" if where.endswith(".py") else value


@dataclass(frozen=True)
class Imported:
    """A function by its import path, which each process that calls it imports by itself.

    Attributes:
        path: The import path.
        flag: The flag that gave it, for errors.
    """

    path: str
    flag: str

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.function(*args, **options)

    @property
    def function(self) -> Callable[..., Any]:
        """The function. UserError where the module, the file or the name is absent, or is no function."""
        where, _, name = self.path.rpartition(":")
        try:
            module = imported_module(where)
        except FileNotFoundError:
            raise UserError(f"{self.flag} {self.path}: there is no such file") from None
        except ModuleNotFoundError as error:
            raise UserError(
                f"{self.flag} {self.path}: there is no module {error.name!r}; a file is named FILE.py:{name}"
            ) from error
        function = getattr(module, name, None)
        if not callable(function):
            raise UserError(f"{self.flag} {self.path}: {where} has no function {name!r}")
        return function

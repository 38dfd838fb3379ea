"""Functions of the user's own by their import path: `module:name`, or `FILE.py:name`.

Import paths run code, so that only the command line may give them: neither a settings file nor a run folder, which may
be a stranger's.
"""

import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError

_FORM = re.compile(r"(?P<where>.*[^:]):(?P<name>[A-Za-z_]\w*)")


def is_import_path(value: object) -> bool:
    """Whether a setting's value is `module:name` or `FILE.py:name`."""
    match = _FORM.fullmatch(value) if type(value) is str else None
    where = match["where"] if match else ""
    return where.endswith(".py") or re.fullmatch(r"\w+(\.\w+)*", where) is not None


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
            module = _module_of_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
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


def _module_of_file(path: Path) -> Any:
    """The module of a file, executed once in a process."""
    if not path.is_file():
        raise FileNotFoundError(path)
    key = f"fnmodels_imported_{path.stem}_{sha256(os.fsencode(path)).hexdigest()[:8]}"
    if key not in sys.modules:
        spec = spec_from_file_location(key, path)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        sys.modules[key] = module  # before it runs: dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]

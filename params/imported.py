"""Modules of the user's own, by the name or the file that a command line gives: no file or folder names one.

A family is such a module (docs/own-model.md): `--family mymodel.py`.
"""

import argparse
import os
import sys
import traceback
from hashlib import sha256
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from fnmodels.errors import UserError


def imported_module(where: str, named: str, *, file: str = "FILE.py") -> ModuleType:
    """The module `package.module`, or that of `FILE.py`, executed once in a process.

    Args:
        where: The module.
        named: The flag with its value, for errors.
        file: How a file would be named there.

    Raises:
        UserError: There is no such module, or it raises an exception when it is executed.
    """
    path = Path(os.path.realpath(where)) if where.endswith(".py") else None
    if path is not None and not path.is_file():
        raise UserError(f"{named}: there is no such file")
    try:
        return import_module(where) if path is None else _module_of_file(path)
    except ModuleNotFoundError as error:
        raise UserError(f"{named}: there is no module {error.name!r}; a file is named {file}") from error
    except UserError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
        raise UserError(f"{named}: it cannot be imported: {what} in {place_raised(error)}") from error


def place_raised(error: BaseException) -> str:
    """The file and line in which an exception was raised."""
    if isinstance(error, SyntaxError):
        return f"{Path(str(error.filename)).name}, line {error.lineno}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}, line {frame.lineno}"


def source_file(where: str) -> str | None:
    """The source file of an imported module; None where it has none."""
    return imported_module(where, where).__file__


def imported_family(where: str) -> Any:
    """The family of `--family`, a module that defines a Config and what stands beside it.

    Raises:
        UserError: There is no such module, or it defines no Config.
    """
    module = imported_module(where, f"--family {where}")
    if not isinstance(getattr(module, "Config", None), type):
        raise UserError(f"--family {where}: it defines no class Config, as a family does (docs/own-model.md)")
    return module


def add_family_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--family` to a command that reads a checkpoint; `imported_family` takes its value."""
    parser.add_argument(
        "--family", metavar="MODULE", help="your own module that reads the model: mymodel.py or package.module"
    )


def _module_of_file(path: Path) -> ModuleType:
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

"""Modules of the user's own, by the name or the file that a command line gives: no file or folder names one.

A family is such a module (docs/own-model.md): `--family mymodel.py`.
"""

import argparse
import importlib
import os
import sys
from hashlib import sha256
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from fnmodels.errors import UserError


def imported_module(where: str) -> ModuleType:
    """The module `package.module`, or that of `FILE.py`, executed once in a process.

    Raises:
        FileNotFoundError: There is no such file.
        ModuleNotFoundError: There is no such module, or one that it imports.
    """
    return _module_of_file(Path(os.path.realpath(where))) if where.endswith(".py") else importlib.import_module(where)


def imported_family(where: str) -> Any:
    """The family of `--family`, a module that defines a Config and what stands beside it.

    Raises:
        UserError: There is no such module, or it defines no Config.
    """
    try:
        module = imported_module(where)
    except FileNotFoundError:
        raise UserError(f"--family {where}: there is no such file") from None
    except ModuleNotFoundError as error:
        raise UserError(f"--family {where}: there is no module {error.name!r}; a file is named as FILE.py") from error
    if not isinstance(getattr(module, "Config", None), type):
        raise UserError(f"--family {where}: it defines no class Config, as a family does (docs/own-model.md)")
    return module


def add_family_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--family` to a command that reads a checkpoint; `imported_family` takes its value."""
    parser.add_argument(
        "--family", metavar="MODULE", help="your own module that reads the model: mymodel.py or package.module"
    )


def _module_of_file(path: Path) -> ModuleType:
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

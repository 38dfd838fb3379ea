"""Functions of the user's own by their import path: `module:name`, or `FILE.py:name`.

Import paths run code, so that only the command line may give them: neither a settings file nor a run folder, which may
be a stranger's.
"""

import inspect
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from params.imported import imported_module, source_file

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
        """The function. UserError where the module or the name is absent or fails, or is no function."""
        where, _, name = self.path.rpartition(":")
        module = imported_module(where, f"{self.flag} {self.path}", file=f"FILE.py:{name}")
        function = getattr(module, name, None)
        if not callable(function):
            raise UserError(f"{self.flag} {self.path}: {where} has no function {name!r}")
        return function

    @property
    def source_files(self) -> tuple[str | None, ...]:
        """The files of the module and of the function, which the module may have from another."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return source_file(self.path.rpartition(":")[0]), getattr(code, "co_filename", None)


class FunctionFailed(UserError):
    """An exception in code that the command line names.

    Attributes:
        code: The flag and its value.
        error: The exception.
        when: Where the run was, as "at step 3"; "": nowhere in particular.
        place: The file and line; "": not known.
    """

    code: str
    error: BaseException
    when: str
    place: str

    @classmethod
    def of(cls, code: str, error: BaseException, when: str = "", place: str = "") -> "FunctionFailed":
        """The failure of `code` by `error`, as one sentence."""
        said = " ".join(str(error).split())[:400]
        what = f"{type(error).__name__}: {said}" if said else type(error).__name__
        failed = cls(f"{code} failed{when and ' '}{when}: {what}{place and f' in {place}'}")
        failed.code, failed.error, failed.when, failed.place = code, error, when, place
        return failed


@contextmanager
def located(when: str) -> Iterator[None]:
    """Adds to a FunctionFailed of the body where the run was, as "at step 3"."""
    try:
        yield
    except FunctionFailed as failed:
        if failed.when:
            raise
        raise FunctionFailed.of(failed.code, failed.error, when, failed.place) from failed.error

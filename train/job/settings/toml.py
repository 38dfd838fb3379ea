"""Settings as a TOML file, in both directions."""

import json
import tomllib
from pathlib import Path
from typing import Any

from fnmodels.errors import UserError
from fnmodels.files import read_text
from params.io.files import is_deep
from train.command_line import suggestion

from .access import FLAG_ONLY, absolute_paths, code_in, flag, sorted_by_group
from .language import Settings
from .runs import RunSettings, types_of

TOML_LIMIT = 50_000  # bytes; all settings take 3,000, and a key of many parts takes time quadratic in them


def toml_values(path: Path, what: str) -> dict[str, Any]:
    """The values of a TOML file of at most `TOML_LIMIT` bytes; `what` it is, for errors. UserError."""
    try:
        values = tomllib.loads(read_text(path, TOML_LIMIT, follow=True))
        deep = is_deep(values)
    except OSError as error:
        raise UserError(f"{path}: the {what} cannot be read ({error.strerror})") from error
    except RecursionError:
        deep = True
    except ValueError as error:
        raise UserError(f"{path} is not TOML: {error}") from error
    if deep:
        raise UserError(f"{path} is not TOML that can be read: it is nested too deeply")
    return values


def read_toml(path: Path, kind: type[RunSettings] = Settings) -> dict[str, Any]:
    """The settings in a TOML file, paths relative to its folder. UserError names an unknown key or invalid value."""
    types, values = types_of(kind), toml_values(path, "file of settings")
    for name, value in values.items():
        if name not in types:
            table = ": settings stand outside of tables" if isinstance(value, dict) else ""
            raise UserError(f"{path}: there is no setting {name!r}{table}{suggestion(name, types)}")
        if name in FLAG_ONLY:
            raise UserError(
                f"{path}: {name} is not read from a file: remove it there, and give {flag(name)} if it is meant"
            )
        try:
            values[name] = types[name].check(value)
        except ValueError as error:
            raise UserError(f"{path}: {name} is {value!r:.80}, which is not {error}") from error
        if code := code_in(types[name], values[name]):
            raise UserError(
                f"{path}: {name} names code, {code[0]}, which no file may run: remove it there, and give {flag(name)} "
                f"{value} if it is meant"
            )
        values[name] = absolute_paths(name, values[name], path.parent, kind)
    return values


def to_toml(settings: RunSettings) -> str:
    """All settings in the form that `read_toml` reads; one without a value or effect is a comment."""
    kind, lines, types = type(settings), [], types_of(type(settings))
    for name in sorted_by_group(kind):
        value = getattr(settings, name)
        unused = value is None or name in FLAG_ONLY or name in settings.replaced[1] or code_in(types[name], value)
        # JSON of these values is valid TOML, but for one character that only TOML must escape.
        text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        lines.append(f"# {name} =\n" if unused else f"{name} = {text}\n")
    return "".join(lines)

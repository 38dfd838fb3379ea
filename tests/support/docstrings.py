"""The names of the reference (docs/api), their functions and classes, and the sections of their docstrings."""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("fnmodels", "fnmodels.inputs", "fnmodels.cache", "fnmodels.research", "params", "train", "train.losses")
PACKAGES += ("train.optim", "train.generation", "train.parallel", "train.integrations.tinker")
NAMED = ("Args", "Raises")
SECTIONS = (*NAMED, "Returns", "Yields")


def reference() -> list[str]:
    """The names that the pages of the reference show, in their order."""
    pages = sorted((ROOT / "docs" / "api").glob("*.md"))
    return [name for page in pages for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)]


def resolve(name: str) -> object:
    """The object of a dotted name: attributes after the longest prefix that is a package of the list."""
    package = max((p for p in PACKAGES if name.startswith(f"{p}.")), key=len)
    if name == "fnmodels.testing":  # not imported by fnmodels
        return importlib.import_module(name)
    return reduce(getattr, name.removeprefix(f"{package}.").split("."), importlib.import_module(package))


def documented() -> dict[str, Any]:
    """{name: function or class} of all that the pages show: names, members of modules, methods; each once."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for name in reference():
        for path, value in _with_members(name, resolve(name)):
            if id(value) not in seen:
                seen.add(id(value))
                found[path] = value
    return found


def _with_members(name: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, ModuleType):
        for member in getattr(value, "__all__", [name for name in vars(value) if not name.startswith("_")]):
            found = getattr(value, member)
            is_package, is_here = hasattr(value, "__path__"), getattr(found, "__module__", "") == value.__name__
            if (inspect.isclass(found) or inspect.isfunction(found)) and (is_package or is_here):
                yield from _with_members(f"{name}.{member}", found)
    elif inspect.isclass(value):
        yield name, value
        for member, member_value in vars(value).items():
            method = getattr(member_value, "__func__", member_value)  # of static and class methods
            is_method = inspect.isfunction(method) and method.__name__ == member  # no default of a field
            if is_method and not member.startswith("_") and not is_protocol(value):
                yield f"{name}.{member}", method
    elif inspect.isroutine(value):
        yield name, inspect.unwrap(value)


def is_protocol(value: type) -> bool:
    """Whether nobody makes instances of it: its text says what they are called with."""
    return getattr(value, "_is_protocol", False)


@dataclasses.dataclass(frozen=True)
class Docstring:
    """text: what precedes the sections. rows: {section: {name: description}}; Returns and Yields have the name ""."""

    text: str
    rows: dict[str, dict[str, str]]


def parsed(value: Any) -> Docstring:
    """The docstring of a function or class, by the rules that griffe has for Google style.

    AssertionError for a section that the site would not recognize: one whose rows are not indented or have no name.
    """
    text, rows, section = [], {}, ""
    for line in (inspect.getdoc(value) or "").splitlines():
        if (heading := line.removesuffix(":")) in SECTIONS and line.endswith(":"):
            section = heading
            assert section not in rows, f"two sections {section}"
            rows[section] = {}
        elif not section:
            text.append(line)
        elif line.strip():
            _add_line(rows[section], line, named=section in NAMED)
    return Docstring("\n".join(text).strip(), rows)


def _add_line(rows: dict[str, str], line: str, *, named: bool) -> None:
    indent = len(line) - len(line.lstrip())
    assert indent >= 4, f"{line!r} ends a section: the site would show it as text"
    row = re.match(r" {4}(\*{0,2}[\w.]+): (\S.*)", line)
    if named and indent == 4:
        assert row, f"{line!r} has no name"
        assert row[1] not in rows, f"two rows {row[1]}"
        rows[row[1]] = row[2]
    else:
        name = next(reversed(rows)) if named else ""
        rows[name] = f"{rows.get(name, '')} {line.strip()}".strip()


def arguments(value: Any) -> list[str]:
    """The names of the arguments of a call, with the asterisks of variadic ones; of a class those of its instances."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    parameters = inspect.signature(value).parameters.values()
    bound = ("self", "cls") if "." in value.__qualname__ else ()
    return [stars.get(p.kind, "") + p.name for p in parameters if p.name not in bound]


def returns(function: Callable[..., Any]) -> bool:
    """Whether its annotation says that a call has a result."""
    return inspect.signature(function).return_annotation not in (None, "None", "NoReturn", inspect.Signature.empty)

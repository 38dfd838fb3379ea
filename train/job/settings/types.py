"""Types of settings: how a value is parsed from a flag or a TOML file, and which values are valid."""

import argparse
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from train.imported import is_import_path, is_module
from train.remat_budget import budget_of

from .lora_flag import LORA_FORM, is_lora

LARGEST = 2**63


@dataclass(frozen=True)
class SettingType:
    """The type of a setting. description: completes "... is not"; read: parses a flag's text; accepts: validates."""

    description: str
    metavar: str
    read: Callable[[str], Any]
    accepts: Callable[[Any], bool]

    def check(self, value: Any) -> Any:
        """The validated value of a file, with ints converted to float where needed. ValueError with the description."""
        if type(value) is list:
            value = tuple(map(_as_float, value))
        for candidate in (value, _as_float(value)):
            if self.accepts(candidate):
                return candidate
        raise ValueError(self.description)

    def parse(self, text: str) -> Any:
        """The `type=` function of argparse for such a value."""
        try:
            return self.check(self.read(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {self.description}") from error


def _as_float(value: Any) -> Any:
    try:
        return float(value) if type(value) is int else value
    except OverflowError:  # too large; rejected by `accepts`
        return value


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) is float and low <= value <= high and math.isfinite(value)


def integer(low: int) -> SettingType:
    return SettingType(
        f"a whole number from {low}", "N", int, lambda value: type(value) is int and low <= value < LARGEST
    )


def choice(*names: str) -> SettingType:
    return SettingType(f"one of {', '.join(names)}", "|".join(names), str, lambda value: value in names)


def choice_or_import(*names: str) -> SettingType:
    """One of the names, or a function of the user's own."""
    described = f"one of {', '.join(names)}, or a function as module:name or FILE.py:name"
    metavar = "|".join((*names, "MODULE:NAME"))
    return SettingType(described, metavar, str, lambda value: value in names or is_import_path(value))


NUMBER = SettingType("a number from 0", "X", float, lambda value: _is_number(value, 0.0, math.inf))
POSITIVE = SettingType("a number above 0", "X", float, lambda value: _is_number(value, 0.0, math.inf) and value > 0)
FRACTION = SettingType("a number from 0 to 1", "X", float, lambda value: _is_number(value, 0.0, 1.0))
FRACTION_BELOW_1 = SettingType(
    "a number from 0 to below 1", "X", float, lambda value: _is_number(value, 0.0, 1.0) and value < 1
)
BETAS = SettingType(
    "two numbers from 0 to below 1",
    "X,X",
    lambda text: tuple(map(float, text.split(","))),
    lambda pair: type(pair) is tuple and len(pair) == 2 and all(_is_number(x, 0.0, 1.0) and x < 1 for x in pair),
)


def _is_text(value: Any) -> bool:
    """Non-empty and valid as a file name: no NUL, and no lone surrogates, which mark bytes that are not UTF-8."""
    if type(value) is not str or value == "" or "\0" in value:
        return False
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


FIELDS_FORM = "fields of config.json as num_experts=8,layer_types=[...], where null leaves a field out"


def parse_fields(text: str) -> dict[str, Any]:
    """The value of --set: names and JSON values, separated by commas; a word without quotes is a text.

    Raises:
        ValueError: The text has another form, or a name stands twice.
    """
    decoder, values, rest = json.JSONDecoder(), dict[str, Any](), text
    while rest:
        name, equals, rest = rest.partition("=")
        try:
            value, end = decoder.raw_decode(rest)
        except json.JSONDecodeError:
            value = rest.partition(",")[0]
            end = len(value) if re.fullmatch(r"[\w./+-]+", value) else 0
        name = name.strip()
        if not (name.isidentifier() and equals and end) or name in values or rest[end : end + 1] not in ("", ","):
            raise ValueError(FIELDS_FORM)
        values[name], rest = value, rest[end + 1 :]
    if not values or text.endswith(","):
        raise ValueError(FIELDS_FORM)
    return values


def are_fields(value: object) -> bool:
    """Whether `value` is a text as --set takes it."""
    try:
        return type(value) is str and bool(parse_fields(value))
    except ValueError:
        return False


REMAT = SettingType(
    "one of none, full, selective, every:N with a whole number N from 1, budget:SIZE with a size such as 2GiB",
    "none|full|selective|every:N|budget:SIZE",
    str,
    lambda value: (
        type(value) is str
        and (re.fullmatch(r"none|full|selective|every:[1-9][0-9]{0,3}", value) or budget_of(value)) is not None
    ),
)
FAMILY = SettingType("a module or FILE.py", "MODULE", str, is_module)
IMPORT = SettingType("a function as module:name or FILE.py:name", "MODULE:NAME", str, is_import_path)
STRING = SettingType("a text", "TEXT", str, _is_text)
NAMES = SettingType(
    "names, separated by commas",
    "NAME,...",
    lambda text: tuple(text.split(",")),
    lambda names: type(names) is tuple and len(names) > 0 and all(map(_is_text, names)),
)
DATA = SettingType("a path", "PATH[:WEIGHT],...", str, STRING.accepts)
FILE = SettingType("a path", "FILE", str, STRING.accepts)
CHECKPOINT = SettingType("a path", "CHECKPOINT", str, STRING.accepts)
FIELDS = SettingType(FIELDS_FORM, "NAME=VALUE,...", str, are_fields)
LORA = SettingType(LORA_FORM, "r=R,...", str, is_lora)

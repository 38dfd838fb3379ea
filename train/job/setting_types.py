"""What values the settings of a run may have: how each is read from a flag and from a file, and what it must be."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .lora_flag import FORM, are_adapters

LARGEST = 2**63


@dataclass(frozen=True)
class Kind:
    """What a value may be. what: the end of "... is not"; read: a flag's text as a value; fits: whether it is one."""

    what: str
    metavar: str
    read: Callable[[str], Any]
    fits: Callable[[Any], bool]

    def check(self, value: Any) -> Any:
        """The value of a file, a number as float where it must be one. ValueError where it is none."""
        if type(value) is list:
            value = tuple(map(_as_float, value))
        for candidate in (value, _as_float(value)):
            if self.fits(candidate):
                return candidate
        raise ValueError(self.what)


def _as_float(value: Any) -> Any:
    try:
        return float(value) if type(value) is int else value
    except OverflowError:  # no number that anybody means
        return value


def _is_number(value: Any, low: float, high: float) -> bool:
    return type(value) is float and low <= value <= high and math.isfinite(value)


def whole(low: int) -> Kind:
    return Kind(f"a whole number from {low}", "N", int, lambda value: type(value) is int and low <= value < LARGEST)


def choice(*names: str) -> Kind:
    return Kind(f"one of {', '.join(names)}", "|".join(names), str, lambda value: value in names)


def _pair(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


NUMBER = Kind("a number from 0", "X", float, lambda value: _is_number(value, 0.0, math.inf))
ABOVE_0 = Kind("a number above 0", "X", float, lambda value: _is_number(value, 0.0, math.inf) and value > 0)
SHARE = Kind("a number from 0 to 1", "X", float, lambda value: _is_number(value, 0.0, 1.0))
BELOW_1 = Kind("a number from 0 to below 1", "X", float, lambda value: _is_number(value, 0.0, 1.0) and value < 1)
BETAS = Kind(
    "two numbers from 0 to below 1",
    "X,X",
    _pair,
    lambda pair: type(pair) is tuple and len(pair) == 2 and all(_is_number(x, 0.0, 1.0) and x < 1 for x in pair),
)


def _is_text(value: Any) -> bool:
    """Also for names of files, which hold no NUL: what is not UTF-8 comes with halves of characters, which none can."""
    if type(value) is not str or value == "" or "\0" in value:
        return False
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


REMAT = Kind(
    "one of none, full, selective, every:N with a whole number N from 1",
    "none|full|selective|every:N",
    str,
    lambda value: type(value) is str and re.fullmatch(r"none|full|selective|every:[1-9][0-9]{0,3}", value) is not None,
)
WORDS = Kind("a text", "TEXT", str, _is_text)
DATA = Kind("a path", "PATH[:WEIGHT],...", str, WORDS.fits)
CHECKPOINT = Kind("a path", "CHECKPOINT", str, WORDS.fits)
LORA = Kind(FORM, "r=R,...", str, are_adapters)

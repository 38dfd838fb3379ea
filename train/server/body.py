"""`Body`: the fields of a request, checked as they are read; others are refused."""

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from fnmodels.models.common.config_json import shown

from .errors import ApiError


def parsed(data: bytes) -> dict[str, Any]:
    """The JSON object in the body of a request. ApiError for other bytes."""

    def no_number(name: str) -> Any:
        raise ValueError(f"{name} is no number of JSON")

    try:
        values = json.loads(data, parse_constant=no_number)
        if b"\\ud" in data.lower():  # half a character, which no tokenizer takes
            json.dumps(values, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body is not JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ApiError(400, f"The body is {shown(values)}; it must be a JSON object.")
    return values


class Body:
    """The fields of a JSON object; null is as if a field were left out.

    Args:
        values: The object.
        where: What stands in front of names in messages, such as "stream_options.".
    """

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._read, self._where = set[str](), where

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def take(self, name: str, default: Any = None) -> Any:
        """A value of any type."""
        self._read.add(name)
        return self._values.get(name, default)

    def peek(self, name: str) -> Any:
        """A value of any type, which counts as unread."""
        return self._values.get(name)

    def wrong(self, name: str, must: str) -> ApiError:
        """The error of a field."""
        full = self._where + name
        return ApiError(400, f"{full} is {shown(self._values.get(name))}; it must be {must}.", param=full)

    def _checked(self, name: str, default: Any, valid: Callable[[Any], bool], must: str) -> Any:
        value = self.take(name)
        if value is None:
            return default
        if not valid(value):
            raise self.wrong(name, must)
        return value

    def text(self, name: str, default: Any = None) -> Any:
        """A string."""
        return self._checked(name, default, lambda value: isinstance(value, str), "a text")

    def needed(self, name: str) -> str:
        """A string that must be there, such as the name of a model."""
        value: str | None = self.text(name)
        if not value:
            raise self.missing(name, "a text that is not empty")
        return value

    def needed_integer(self, name: str) -> int:
        """An integer from 0 that must be there."""
        value: int | None = self.integer(name)
        if value is None:
            raise self.missing(name, "an integer of at least 0")
        return value

    def missing(self, name: str, must: str) -> ApiError:
        """The error of a field that is not there."""
        full = self._where + name
        return ApiError(400, f"{full} is missing; it must be {must}.", param=full)

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        return bool(self._checked(name, default, lambda value: isinstance(value, bool), "true or false"))

    def integer(self, name: str, default: Any = None, *, low: int = 0, high: int = 2**63 - 1) -> Any:
        """An integer from low to high."""
        must = f"an integer of at least {low}" if high == 2**63 - 1 else f"an integer from {low} to {high}"
        return self._checked(name, default, lambda value: type(value) is int and low <= value <= high, must)

    def number(self, name: str, default: Any = None, *, low: float = -math.inf, high: float = math.inf) -> Any:
        """A finite number from low to high."""
        value = self.take(name)
        if value is None:
            return default
        try:
            number = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:  # an integer beyond all floating-point numbers
            number = math.nan
        if not (math.isfinite(number) and low <= number <= high):
            limits = [f"at least {low:g}"] * (low > -math.inf) + [f"at most {high:g}"] * (high < math.inf)
            raise self.wrong(name, " ".join(("a number", " and ".join(limits))).strip())
        return number

    def object(self, name: str) -> "Body | None":
        """The fields of an object."""
        value = self._checked(name, None, lambda value: isinstance(value, dict), "an object")
        return None if value is None else Body(value, f"{self._where}{name}.")

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A text, or a list of at most so many."""
        value = self.take(name)
        value = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(value, list) or len(value) > most or not all(isinstance(one, str) and one for one in value):
            raise self.wrong(name, f"a text, or a list of at most {most}, none of them empty")
        return tuple(value)

    def finish(self, without_effect: Iterable[tuple[str, Any]] = (), harmless: Collection[str] = ()) -> None:
        """ApiError for a field that was not read, unless it has no effect.

        without_effect: (name, value) of fields that have none with this value. harmless: names of those that have none.
        """
        for name in sorted(self._values.keys() - self._read - set(harmless)):
            if (name, self._values[name]) in ((known, value) for known, value in without_effect):
                continue
            full = self._where + name
            raise ApiError(400, f"{full} is not supported by this server: leave it out.", param=full)

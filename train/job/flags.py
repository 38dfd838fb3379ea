"""Settings as command-line flags: parsing, and how a value is written."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from train.job.setting_types import Kind


def as_flag(value: Any) -> str:
    """A value as it is written behind its flag."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def value_of(kind: Kind) -> Callable[[str], Any]:
    """The type of a flag."""

    def convert(text: str) -> Any:
        try:
            return kind.check(kind.read(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind.what}") from error

    return convert

"""Conversion of settings from and to the text of command-line flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from train.job.setting_types import SettingType


def as_flag(value: Any) -> str:
    """The text of a value on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def value_of(setting_type: SettingType) -> Callable[[str], Any]:
    """The `type=` function of argparse for a setting."""

    def convert(text: str) -> Any:
        try:
            return setting_type.check(setting_type.read(text))
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not {setting_type.description}") from error

    return convert

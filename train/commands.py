"""What the commands have in common: flags with checked values, and mistakes told in one sentence with exit code 2."""

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn, TypeVar

from fnmodels.errors import CheckpointError
from train.errors import UserError

T = TypeVar("T", int, float)

EXTRA_OF = {
    "tokenizers": "text",
    "jinja2": "text",
    "tensorboard": "log",
    "matplotlib": "log",
    "rich": "log",
    "pyarrow": "data",
    "lm_eval": "eval",
}


class Parser(argparse.ArgumentParser):
    """A mistake is a UserError, where argparse would print the usage and end the process; names are not guessed."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise UserError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            what = "flag" if name.startswith("-") else "argument"
            raise UserError(f"there is no {what} {name}{nearest(name, self._option_string_actions)}")
        return found


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about a name that is none of `names`."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; the nearest is {close[0]}" if close else ""


def at_least(low: T) -> Callable[[str], T]:
    """A flag's type: a number of the type of `low`, and not below it."""
    kind = "a whole number" if isinstance(low, int) else "a number"

    def convert(text: str) -> T:
        try:
            value = type(low)(text)
        except ValueError:
            value = None
        if value is None or not low <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r} is not {kind} from {low:g}")
        return value

    return convert


def run_command(
    name: str,
    parser: Callable[[], Parser],
    command: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
    needs: tuple[str, ...],
) -> int:
    """Parse and run; returns the exit code. 2: the user can put it right; 130: stopped by Ctrl-C."""
    try:
        arguments = parser().parse_args(argv)
        check_installed(needs)
        return command(arguments)
    except (UserError, CheckpointError) as error:
        print(f"{name}: {sentence(str(error))}", file=sys.stderr)
    except OSError as error:
        print(
            f"{name}: {sentence(f'{error.filename}: {error.strerror}' if error.filename else str(error))}",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return 130
    return 2


def check_installed(packages: tuple[str, ...]) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        extras = ",".join(sorted({EXTRA_OF[package] for package in missing}))
        raise UserError(f'{" and ".join(missing)} must be installed for this: pip install "fnmodels[{extras}]"')


def sentence(text: str) -> str:
    """One line that ends with a full stop."""
    line = " ".join(text.split())
    return line if line.endswith((".", "!", "?")) else line + "."

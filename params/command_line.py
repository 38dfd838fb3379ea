"""What the commands have in common: mistakes told in one sentence on standard error, with exit code 2."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fnmodels.errors import CheckpointError, UserError

NO_MEMORY = "can't allocate memory"  # torch's words, in a RuntimeError


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
            raise UserError(f"there is no {what} {name}{suggestion(name, self._option_string_actions)}")
        return found


def program_name(script: str, module: str) -> str:
    """The name that the user called: that of an installed script, or of a module."""
    return script if Path(sys.argv[0]).stem == script else f"python -m {module}"


def suggestion(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about a name that is none of `names`."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; the nearest is {close[0]}" if close else ""


def run_command(
    name: str,
    parser: Callable[[], Parser],
    command: Callable[[argparse.Namespace], int],
    argv: Sequence[str] | None,
) -> int:
    """Parse and run; returns the exit code. 2: the user can put it right; 130: stopped by Ctrl-C."""
    try:
        return command(parser().parse_args(argv))
    except (UserError, CheckpointError) as error:
        told = str(error)
    except OSError as error:
        told = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except MemoryError:
        told = "there is not enough memory for this"
    except RuntimeError as error:
        if NO_MEMORY not in str(error):
            raise
        told = "there is not enough memory for this"
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return 130
    print(f"{name}: {sentence(told)}", file=sys.stderr)
    return 2


def sentence(text: str) -> str:
    """One line that ends with a full stop, without what would move a terminal's cursor."""
    line = printable(" ".join(text.split()))
    return line if line.endswith((".", "!", "?")) else line + "."


def printable(text: str) -> str:
    """Names in a file may hold what moves a terminal's cursor, or halves of characters that nothing can print."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)

"""Command-line helpers shared by all commands: an argument parser, error sentences on standard error, exit codes."""

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from fnmodels.errors import CheckpointError, UserError, is_out_of_memory, printable


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError instead of exiting, and accepts no abbreviated flags."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

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
    """The name under which this process was started: the console script's or `python -m module`."""
    return script if Path(sys.argv[0]).stem == script else f"python -m {module}"


def suggestion(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: "; the nearest is ..." if one of `names` is similar, else ""."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; the nearest is {close[0]}" if close else ""


def run_command(
    name: str, parser: Callable[[], Parser], command: Callable[[argparse.Namespace], int], argv: Sequence[str] | None
) -> int:
    """Parse `argv` and run `command`; returns its exit code, 2 for an error that the user can fix, 130 after Ctrl-C."""
    try:
        return command(parser().parse_args(argv))
    except (UserError, CheckpointError) as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        named = type(error) is MemoryError and str(error)  # by `memory_for`
        message = named or "there is not enough memory for this"
    except KeyboardInterrupt:
        print(f"{name}: stopped", file=sys.stderr)
        return 130
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # what libraries in Rust raise, such as tokenizers
            raise
        message = f"a library failed: {error}"
    print(f"{name}: {sentence(message)}", file=sys.stderr)
    return 2


def sentence(text: str) -> str:
    """`text` as one printable line that ends with a full stop."""
    line = printable(" ".join(text.split()))
    return line if line.endswith((".", "!", "?")) else line + "."


def terminal_text(text: str) -> str:
    """A model's or file's text for a terminal, with the control codes escaped that could steer it; it may be a part."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


# All of Unicode's control codes but tab and newline, halves of characters, and what turns the direction of writing.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")

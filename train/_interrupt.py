"""Ctrl-C while a command imports its packages, which takes seconds: one line and exit code 130, as it is later."""

import os
import sys
from types import TracebackType


def starting_command() -> str | None:
    """The command of `train` that this process is starting; None in every other program that imports the package."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    if name == "-m" and "-m" in sys.orig_argv:  # as long as the module is being found
        module = sys.orig_argv[sys.orig_argv.index("-m") + 1]
        return f"python -m {module}" if module.partition(".")[0] == "train" else None
    return name if name in ("fnmodels-train", "fnmodels-sample") else None


def exit_in_one_line() -> None:
    """Replaces the traceback of a KeyboardInterrupt, if this process is starting a command."""
    command, before = starting_command(), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            return before(kind, error, trace)
        print(f"{command}: stopped", file=sys.stderr)
        raise SystemExit(130)

    if command is not None:
        sys.excepthook = hook

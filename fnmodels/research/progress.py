"""Progress of long computations: a bar on a terminal, else a line from time to time, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Report = Callable[[int, int], None]  # of what is done and the total, after each part

_WIDTH = 30
_SECONDS = 10  # between lines where there is no terminal


def progress_bar(what: str = "cells") -> Report:
    """A function report(done, total) that shows how much is done and how long the rest takes. what: names the parts."""
    begin = shown = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal shown
        live, now = sys.stderr.isatty(), time.monotonic()
        if not live and now - shown < _SECONDS and done < total:
            return
        shown = now
        size = _WIDTH * done // max(total, 1)
        bar = f"[{'#' * size}{'.' * (_WIDTH - size)}] " if live else ""
        left = (now - begin) / max(done, 1) * (total - done)
        line = f"{bar}{done}/{total} {what}, {left:,.0f} s left"
        sys.stderr.write(f"\r{line}\x1b[K" if live else line)
        sys.stderr.write("" if live and done < total else "\n")
        sys.stderr.flush()

    return report

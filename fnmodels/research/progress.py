"""Progress of long computations: a bar on a terminal, else a line from time to time, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

OnProgress = Callable[[int, int], None]  # of what is done and the total, after each part

_WIDTH = 30
_SECONDS = 10  # between lines where there is no terminal


def progress_bar(what: str = "cells") -> OnProgress:
    """A function for `progress=` that shows how much is done and how long the rest takes.

    Args:
        what: The name of the counted parts.

    Returns:
        report(done, total).
    """
    begin = time.monotonic()
    return _Bar(what, begin, begin)


@dataclass
class _Bar:
    """shown: when the last line was written, as begin in seconds of the monotonic clock."""

    what: str
    begin: float
    shown: float

    def __call__(self, done: int, total: int) -> None:
        live, now = sys.stderr.isatty(), time.monotonic()
        if not live and now - self.shown < _SECONDS and done < total:
            return
        self.shown = now
        size = _WIDTH * done // max(total, 1)
        bar = f"[{'#' * size}{'.' * (_WIDTH - size)}] " if live else ""
        left = (now - self.begin) / max(done, 1) * (total - done)
        line = f"{bar}{done}/{total} {self.what}, {left:,.0f} s left"
        sys.stderr.write(f"\r{line}\x1b[K" if live else line)
        sys.stderr.write("" if live and done < total else "\n")
        sys.stderr.flush()

"""Progress output: a live bar on a terminal, else a plain line from time to time."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

Report = Callable[[int, float, float, float], None]
PLAIN_LINES = 20
PLAIN_SECONDS = 10
LINE_SECONDS = 30  # between two lines where steps are slow


@contextmanager
def progress(total: int, start: int) -> Iterator[Report]:
    """Yields report(step, loss, lr, tokens per second), to be called after every step."""
    begin, first = time.monotonic(), [0.0]  # first: the seconds of the first step, which warms up and compiles

    def status(step: int, loss: float, lr: float, speed: float) -> str:
        passed = time.monotonic() - begin
        if step == start + 1:
            first[0] = passed
        text, later = f"loss {loss:6.3f}  lr {lr:.1e}  {speed:,.0f} tokens/s", step - start - 1
        if not later:  # the first step tells nothing of the others
            return text
        left = (passed - first[0]) / later * (total - step)
        return f"{text}  {timedelta(seconds=round(left))} left"

    if not sys.stdout.isatty():
        every, last_line = max(1, total // PLAIN_LINES), begin

        def plain(step: int, loss: float, lr: float, speed: float) -> None:
            nonlocal last_line
            text, now = status(step, loss, lr, speed), time.monotonic()
            due = step % every == 0 or step in (start + 1, start + 2, total)  # of the second step on, the time is known
            if due or now - last_line > LINE_SECONDS:
                last_line = now
                print(f"step {step}/{total}  {text}", flush=True)

        yield plain
        return

    columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.fields[status]}")
    with Progress(*columns, console=Console(file=sys.stdout), expand=True, refresh_per_second=2) as bar:
        task = bar.add_task("", total=total, completed=start, status="")

        def live(step: int, loss: float, lr: float, speed: float) -> None:
            bar.update(task, completed=step, status=status(step, loss, lr, speed))

        yield live


@contextmanager
def tokenizing() -> Iterator[Callable[[int, int], None]]:
    """Yields report(characters done, characters in total). Shows nothing before the first call, or for short texts."""
    if not sys.stdout.isatty():
        last_print = time.monotonic()

        def plain(done: int, total: int) -> None:
            nonlocal last_print
            if time.monotonic() - last_print > PLAIN_SECONDS:
                last_print = time.monotonic()
                print(f"tokenized {done / total:.0%} of {total / 1e6:.0f} million characters", flush=True)

        yield plain
        return

    columns = TextColumn("tokenizing"), BarColumn(bar_width=None), TaskProgressColumn(), TimeRemainingColumn()
    bar = Progress(*columns, console=Console(file=sys.stdout), expand=True, refresh_per_second=2)
    task = bar.add_task("")

    def live(done: int, total: int) -> None:
        bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield live
    finally:
        bar.stop()

"""How far the run is: a live bar on a terminal, now and then a plain line elsewhere."""

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


@contextmanager
def progress(total: int, start: int) -> Iterator[Report]:
    """Yields report(step, loss, lr, tokens per second), to be called after every step."""
    begin = time.monotonic()

    def words(step: int, loss: float, lr: float, speed: float) -> str:
        left = (time.monotonic() - begin) / max(step - start, 1) * (total - step)
        return f"loss {loss:6.3f}  lr {lr:.1e}  {speed:,.0f} tokens/s  {timedelta(seconds=round(left))} left"

    if not sys.stdout.isatty():
        every = max(1, total // PLAIN_LINES)

        def plain(step: int, loss: float, lr: float, speed: float) -> None:
            if step % every == 0 or step in (start + 1, total):
                print(f"step {step}/{total}  {words(step, loss, lr, speed)}", flush=True)

        yield plain
        return

    columns = TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TextColumn("{task.fields[words]}")
    with Progress(*columns, console=Console(file=sys.stdout), expand=True, refresh_per_second=2) as bar:
        task = bar.add_task("", total=total, completed=start, words="")

        def live(step: int, loss: float, lr: float, speed: float) -> None:
            bar.update(task, completed=step, words=words(step, loss, lr, speed))

        yield live


@contextmanager
def tokenizing() -> Iterator[Callable[[int, int], None]]:
    """Yields report(characters done, of how many); nothing is shown before it is called, nor where it is soon over."""
    if not sys.stdout.isatty():
        told = time.monotonic()

        def plain(done: int, total: int) -> None:
            nonlocal told
            if time.monotonic() - told > PLAIN_SECONDS:
                told = time.monotonic()
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

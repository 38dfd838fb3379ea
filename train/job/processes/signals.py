"""Ctrl-C, and SIGTERM, as a request that the loop answers between two steps."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yields asked(). The first signal only asks; a second one ends the process as if nobody listened."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may listen to signals
        yield lambda: False
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    asked = threading.Event()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()
        restore()
        os.write(2, b"\nstopping after this step, then saving; once more to stop at once\n")  # print is not reentrant

    for number in SIGNALS:
        signal.signal(number, ask)
    try:
        yield asked.is_set
    finally:
        restore()

"""Stop requests: SIGINT (Ctrl-C), SIGTERM and SIGUSR1 are noted, and the training loop stops between two steps."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP = signal.SIGUSR1  # sent by the process that started this one (`spawn`), or by a scheduler
SIGNALS = (signal.SIGINT, signal.SIGTERM, STOP)


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yields stop_requested(). The first signal only sets it; a second one has its default effect."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set signal handlers
        yield lambda: False
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    stop_requested = threading.Event()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def request(number: int, frame: FrameType | None) -> None:
        stop_requested.set()
        restore()
        os.write(2, b"\nstopping after this step, then saving; once more to stop at once\n")  # print is not reentrant

    for number in SIGNALS:
        signal.signal(number, request)
    try:
        yield stop_requested.is_set
    finally:
        restore()


@contextmanager
def counted_requests() -> Iterator[Callable[[], int]]:
    """Yields a function that returns the number of stop requests so far, for a process that passes them on."""
    requests: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield lambda: 0
        return
    before = {number: signal.signal(number, lambda got, _: requests.append(got)) for number in SIGNALS}
    try:
        yield lambda: len(requests)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

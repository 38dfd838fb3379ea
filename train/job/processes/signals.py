"""Stop requests: SIGINT (Ctrl-C), SIGTERM and SIGUSR1 are noted, and the training loop stops between two steps."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

STOP = signal.SIGUSR1  # sent by the process that started this one (`spawn`), or by a scheduler
SIGNALS = (signal.SIGINT, signal.SIGTERM, STOP)


@contextmanager
def handled(
    handler: Callable[[int, FrameType | None], object] | signal.Handlers, signals: Sequence[signal.Signals] = SIGNALS
) -> Iterator[Callable[[], None]]:
    """Sets the handler of the signals, which only the main thread can; yields a function that restores the former."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number in signals if main}

    def restore() -> None:
        for number, former in before.items():
            signal.signal(number, former)

    try:
        yield restore
    finally:
        restore()


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Yields stop_requested(). The first signal only sets it; a second one has its default effect."""
    stop_requested = threading.Event()

    def request(number: int, frame: FrameType | None) -> None:
        stop_requested.set()
        restore()
        os.write(2, b"\nstopping after this step, then saving; once more to stop at once\n")  # print is not reentrant

    with handled(request) as restore:
        yield stop_requested.is_set


@contextmanager
def counted_requests() -> Iterator[Callable[[], int]]:
    """Yields a function that returns the number of stop requests so far, for a process that passes them on."""
    requests: list[int] = []
    with handled(lambda number, _: requests.append(number)):
        yield lambda: len(requests)

"""Threads for what may block: the steps of environments, and rollouts beside training."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

Job = tuple[int, Callable[[], Any]]
Done = tuple[int, Any, BaseException | None]


class Helpers:
    """Jobs over daemon threads, which never keep a process alive; without threads a job runs where it is given.

    Args:
        workers: The number of threads; 0: none.
    """

    def __init__(self, workers: int) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._done: SimpleQueue[Done] = SimpleQueue()
        self._workers, self._open = workers, 0
        for _ in range(workers):
            threading.Thread(target=self._work, daemon=True).start()

    def submit(self, number: int, function: Callable[[], Any]) -> None:
        """Runs a function; `finished` has its result under this number."""
        self._open += 1
        if self._workers:
            self._jobs.put((number, function))
        else:
            self._done.put(_run(number, function))

    def finished(self, *, wait: bool) -> list[tuple[int, Any]]:
        """(number, result) of the jobs that ended since the last call; raises what one of them raised.

        Args:
            wait: Whether to wait for one, where there are any.

        Returns:
            The results, in the order in which they came.
        """
        found = list[tuple[int, Any]]()
        while self._open:
            try:
                # a timeout lets Ctrl-C through on every platform
                number, result, error = self._done.get(timeout=0.5) if wait and not found else self._done.get_nowait()
            except Empty:
                if wait and not found:
                    continue
                break
            self._open -= 1
            if error is not None:
                raise error
            found.append((number, result))
        return found

    def close(self) -> None:
        """Ends the threads after the jobs that they run; those that none has begun are dropped."""
        while True:
            try:
                self._jobs.get_nowait()
            except Empty:
                break
        for _ in range(self._workers):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._done.put(_run(*job))


def _run(number: int, function: Callable[[], Any]) -> Done:
    try:
        return number, function(), None
    except BaseException as error:  # raised again by `finished`, in the thread that reads the result
        return number, None, error

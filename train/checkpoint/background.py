"""Saving while the next steps are made: the step waits for a copy, a thread does the rest."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree

from .saved_steps import plain


class Saver:
    """Calls `write(tree, *rest)` in a thread, on a copy in the memory of the host.

        with Saver(write) as saver:
            for step in ...:
                saver.check()  # raises what the save under way has failed with
                ...
                saver.save(state, ...)  # returns once the copy is made: the state may be written to again

    The copy's memory stays for the next one, for getting it anew would cost twice the time. One save at a time: `save`
    waits for the one before where that is not finished, so that a slow disk costs time and never memory. Leaving the
    block waits too, and raises the failure of the last save.
    """

    def __init__(self, write: Callable[..., object]) -> None:
        self._write = write
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._running: Future[object] | None = None
        self._buffers: dict[str, Tensor] = {}

    def save(self, state: Tree, *rest: Any) -> None:
        self.wait()
        self._running = self._pool.submit(self._write, self._copied(state), *rest)

    def check(self) -> None:
        """Raise what the save under way has failed with, if it has; never waits."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Until the save under way is finished; raises what it has failed with."""
        if self._running is not None:
            try:
                self._running.result()
            finally:
                if self._running.done():  # else it was Ctrl-C that ended the waiting
                    self._running = None

    @torch.no_grad()
    def _copied(self, state: Tree) -> Tree:
        flat = tree.flatten(state)
        for path, leaf in flat.items():
            if not plain(leaf):  # of DTensors, the thread's messages would meet those of the steps
                raise TypeError(f"{path} is of type {type(leaf).__name__}; a thread can save plain tensors alone.")
        if [*map(_kind, self._buffers.items())] != [*map(_kind, flat.items())]:
            self._buffers = {
                path: torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") for path, leaf in flat.items()
            }
        copies = iter([self._buffers[path].copy_(leaf) for path, leaf in flat.items()])
        return tree.map(lambda _: next(copies), state)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if error is None:
                self.wait()
            elif isinstance(error, Exception):
                try:
                    self.wait()
                except Exception as second:  # the first error is what the caller must see, and it carries this one
                    error.add_note(f"And the save under way failed: {second}")
        finally:
            self._pool.shutdown(wait=False)


def _kind(item: tuple[str, Tensor]) -> tuple[str, torch.Size, torch.dtype]:
    path, leaf = item
    return path, leaf.shape, leaf.dtype

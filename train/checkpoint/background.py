"""Background saves: the step waits for a copy of the state, and a thread writes it."""

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
    """Calls `write(tree, *rest)` in a thread, on a copy in host memory.

        with Saver(write) as saver:
            for step in ...:
                saver.check()  # raises the error of the last save, if it failed
                ...
                saver.save(state, ...)  # returns once the copy is made: the state may be overwritten

    The buffer of the copy is reused, because allocating it again would double the time. There is one save at a time:
    `save` waits for the previous one, so that a slow disk costs time and never memory. Leaving the block waits too, and
    raises the error of the last save.

    Args:
        write: Called in the thread with the copied tree and the other arguments of `save`.
    """

    def __init__(self, write: Callable[..., object]) -> None:
        self._write = write
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._running: Future[object] | None = None
        self._buffers: dict[str, Tensor] = {}

    def save(self, state: Tree, *rest: Any) -> None:
        """Copies a tree to host memory and begins to write the copy; it waits for the previous save first.

        Args:
            state: The tree of tensors. It may be overwritten once this returns.
            *rest: Further arguments of `write`, passed on unchanged.
        """
        self.wait()
        self._running = self._pool.submit(self._write, self._copied(state), *rest)

    def check(self) -> None:
        """Raises the error of the current save if it has failed; never waits."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait(self) -> None:
        """Waits until the current save is finished; raises its error."""
        if self._running is not None:
            try:
                self._running.result()
            finally:
                if self._running.done():  # else Ctrl-C ended the wait
                    self._running = None

    @torch.no_grad()
    def _copied(self, state: Tree) -> Tree:
        flat = tree.flatten(state)
        for path, leaf in flat.items():
            if not plain(leaf):  # with DTensors, the thread's collectives would interleave with those of the steps
                raise TypeError(
                    f"{path} is of type {type(leaf).__name__}; a background save supports plain tensors only."
                )
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
                except Exception as second:  # the caller must see the first error; it carries this one as a note
                    error.add_note(f"The save in progress failed too: {second}")
        finally:
            self._pool.shutdown(wait=False)


def _kind(item: tuple[str, Tensor]) -> tuple[str, torch.Size, torch.dtype]:
    path, leaf = item
    return path, leaf.shape, leaf.dtype

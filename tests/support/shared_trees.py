"""A pytest plugin: a test that writes to a tree that tests share fails, with the leaf's name.

    @SharedTrees
    def generic_params(config, dtype): ...       # a tree that is made once, and handed to every test that asks

Every tree that was handed out during a test is compared with what it was when it was made: its leaves by their bytes,
versions and `requires_grad`, its containers by their leaves. So writes of numpy, of kernels and over ends of buffers
are found too. A tree that has changed is made anew for the next test.
"""

import functools
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fnmodels import tree


class SharedTree:
    """A tree, and what it was when it was made."""

    def __init__(self, name: str, params: Any) -> None:
        self.name, self.params, self.leaves = name, params, tree.flatten(params)
        # read through the buffer protocol: a sum in torch would take three times as long
        self.bytes = [memoryview(leaf.reshape(-1).view(torch.uint8).numpy()) for leaf in self.leaves.values()]
        self.state = self._state()
        self.borrower = "no test"  # the last one that was handed it

    def _state(self) -> list[tuple[int, int, bool]]:
        parts = zip(self.leaves.values(), self.bytes, strict=True)
        return [(zlib.adler32(held), leaf._version, leaf.requires_grad) for leaf, held in parts]

    def changes(self) -> list[str]:
        """What has changed since it was made, a sentence for each leaf."""
        now = tree.flatten(self.params)
        found = [f"{path!r} was added" for path in now.keys() - self.leaves.keys()]
        for (path, leaf), was, state in zip(self.leaves.items(), self.state, self._state(), strict=True):
            if now.get(path) is not leaf:
                found.append(f"{path!r} was replaced or removed")
            if state != was:
                found.append(f"{path!r} was written to{_how_bad(leaf)}")
        return found


def _how_bad(leaf: Tensor) -> str:
    bad = int((~leaf.detach().isfinite()).sum())
    return f", and {bad} of its {leaf.numel()} elements are not finite" if bad else ""


class SharedTrees:
    """A function (config, dtype) -> tree that makes each one once; see the module."""

    every: list["SharedTrees"] = []  # noqa: RUF012 - all of the process

    def __init__(self, make: Callable[[Any, torch.dtype], Any]) -> None:
        functools.update_wrapper(self, make)
        self.make = make
        self.kept: dict[Any, SharedTree] = {}
        self.lent: dict[Any, SharedTree] = {}  # since the last call of `settle`
        self.every.append(self)

    def __call__(self, config: Any, dtype: torch.dtype = torch.float32) -> Any:
        key = (config, dtype)
        if (shared := self.lent.get(key)) is None:
            shared = self.kept.get(key)
            if shared is None:
                with torch.inference_mode(False):  # the next test may want gradients
                    shared = SharedTree(f"{getattr(config, 'model_type', config)} in {dtype}", self.make(*key))
            elif found := shared.changes():
                del self.kept[key]
                raise AssertionError(_sentence(shared, found) + f", after {shared.borrower} had ended.")
            self.kept[key] = self.lent[key] = shared
        return shared.params

    def cache_clear(self) -> None:
        """Forgets all trees."""
        self.kept.clear()
        self.lent.clear()

    def settle(self, test: str, last: bool = False) -> list[str]:
        """Forgets those of the trees handed out that have changed; a sentence for each. last: of all trees."""
        found = []
        for key, shared in tuple((self.kept if last else self.lent).items()):
            was_lent = key in self.lent
            if changes := shared.changes():
                by = f" by {test}." if was_lent else f", after {shared.borrower} had ended."
                found.append(_sentence(shared, changes) + by)
                del self.kept[key]
            shared.borrower = test if was_lent else shared.borrower
        self.lent.clear()
        return found


def _sentence(shared: SharedTree, changes: list[str]) -> str:
    return f"The shared tree of {shared.name} was changed: {'; '.join(changes)}"


class Guard:
    """The plugin: looks at the end of each test, after its fixtures; after the last one at all trees."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        try:
            return (yield)
        finally:
            every = (trees.settle(item.nodeid, last=nextitem is None) for trees in SharedTrees.every)
            if found := [sentence for sentences in every for sentence in sentences]:
                raise AssertionError("\n".join(found))

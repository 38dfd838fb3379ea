"""`remembered`: caches what ranks agree on about a batch, so that they communicate once and not in every layer."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def remembered(make: Callable[..., T]) -> Callable[..., T]:
    """Caches `make(key, ...)` by the identity of `key`, until `key` is freed.

    A mask is one object in all layers of a kind, and again in rematerialisation, on every rank alike, so its collective
    runs once per batch. Under compilation, which sees one layer, it runs each time.
    """
    known: dict[int, T] = {}

    def find(key: Any, *more: Any) -> T:
        if torch.compiler.is_compiling():
            return make(key, *more)
        if id(key) not in known:
            known[id(key)] = make(key, *more)
            weakref.finalize(key, known.pop, id(key), None)
        return known[id(key)]

    return find

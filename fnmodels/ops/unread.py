"""Gradients that are differentiated and never read, as in a Hessian-vector product: nodes without values."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from .torch_internals import is_plain_eager

_UNREAD: ContextVar[bool] = ContextVar("fnmodels_unread_gradients", default=False)


def gradients_are_unread(weight: Tensor) -> bool:
    """Whether this leaf is used in a scope of `unread_gradients`, outside of all transforms."""
    return not torch.compiler.is_compiling() and _UNREAD.get() and is_plain_eager(weight) and weight.is_leaf


@contextmanager
def unread_gradients() -> Iterator[None]:
    """A scope of a forward pass and its gradient with create_graph=True, which is only differentiated, never read.

    The gradients of weights that are leaves may be NaN there, which saves their products: one in nine of a
    Hessian-vector product.
    """
    before = _UNREAD.set(True)
    try:
        yield
    finally:
        _UNREAD.reset(before)


def within_unread() -> bool:
    """Whether the code runs in a scope of `unread_gradients`, outside of compiled graphs."""
    return not torch.compiler.is_compiling() and _UNREAD.get()

"""Whether Python may read a tensor's values, and reading them unseen by transforms and modes. Public names of torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def has_values(tensor: Any) -> bool:
    """Whether it is a plain tensor with values in memory: not wrapped by torch.func, not fake, not on meta."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and _has_storage(tensor) and tensor.device.type != "meta"


def readable(tensor: Any) -> bool:
    """Whether Python may ask for values: not of vmap's tensors, of fake and traced ones, nor on meta."""
    return has_values(unwrapped(tensor))


def unwrapped(tensor: Any) -> Any:
    """What `torch.func.grad` has put in its wrappers: all arguments of the function, also those without a gradient."""
    while isinstance(tensor, Tensor):
        inner = torch.func.debug_unwrap(tensor, recurse=False)
        if inner is tensor or inner.ndim != tensor.ndim:  # vmap's hold one dimension more
            break
        tensor = inner
    return tensor


def batched_gradient(tensor: Tensor) -> bool:
    """Whether it is one of autograd.grad(is_grads_batched=True): batched by another vmap than that of torch.func."""
    return not _has_storage(tensor) and torch.func.debug_unwrap(tensor, recurse=False) is tensor


def aside(function: Callable[..., T], *args: Any) -> T:
    """function(*args) in a thread of its own, where no transform and no mode of the caller is active.

    Inside of a transform results are wrapped, even those of plain tensors, and a tracer records what makes them.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def _has_storage(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except NotImplementedError:  # wrapped by a transform
        return False
    return True

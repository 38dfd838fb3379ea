"""Reading tensor values on the host under transforms and modes, with public names of torch only."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def has_values(tensor: Any) -> bool:
    """Whether `tensor` is plain, with values in memory: not wrapped by torch.func, not fake, not on meta."""
    if type(tensor) is not Tensor and type(tensor) is not torch.nn.Parameter:
        return False
    try:  # as `_has_storage`, without a call of its own: every forward pass asks several times
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return not tensor.is_meta


def readable(tensor: Any) -> bool:
    """Whether Python may read values: not of tensors under vmap, of fake and traced ones, nor on meta."""
    return has_values(unwrapped(tensor))


Constants = dict[Any, Tensor]
_CONSTANTS: ContextVar[Constants | None] = ContextVar("constants of a CUDA graph", default=None)


@contextmanager
def without_host(made: Constants) -> Iterator[None]:
    """Within it no values are read on the host nor copied from it, as where a CUDA graph is captured.

    made: the constants, which the runs before the capture make and the graph reads.
    """
    before = _CONSTANTS.set(made)
    try:
        yield
    finally:
        _CONSTANTS.reset(before)


def at_hand(tensor: Tensor) -> Tensor | None:
    """`tensor` as `unwrapped` gives it, if Python may read its values without waiting for a device; else None.

    None in code that is being compiled, under vmap over it, `without_host`, and off the CPU.
    """
    if torch.compiler.is_compiling() or _CONSTANTS.get() is not None or not tensor.is_cpu:
        return None
    if has_values(tensor):  # which a wrapped tensor does not have
        return tensor
    inner = unwrapped(tensor)
    return inner if has_values(inner) else None


def host_reads() -> bool:
    """Whether the code is not being compiled and this is not `without_host`: values may be read where there are any."""
    return not torch.compiler.is_compiling() and _CONSTANTS.get() is None


def host_is_away() -> bool:
    """Whether this is `without_host`."""
    return not torch.compiler.is_compiling() and _CONSTANTS.get() is not None


def constants(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values as a tensor [len(values)], which is not to be written."""
    if not host_is_away():
        return torch.tensor(values, dtype=dtype, device=device)
    made = _CONSTANTS.get()
    assert made is not None
    key = tuple(values), dtype, device
    if key not in made:
        made[key] = torch.tensor(values, dtype=dtype, device=device)
    return made[key]


def unwrapped(tensor: Any) -> Any:
    """`tensor` without the wrappers of `torch.func.grad`, which wraps all arguments, also those without a gradient."""
    while isinstance(tensor, Tensor):
        inner = torch.func.debug_unwrap(tensor, recurse=False)
        if inner is tensor or inner.ndim != tensor.ndim:  # vmap's hold one dimension more
            break
        tensor = inner
    return tensor


def batched_gradient(tensor: Tensor) -> bool:
    """Whether `tensor` is batched by autograd.grad(is_grads_batched=True), whose vmap is not that of torch.func."""
    return not _has_storage(tensor) and torch.func.debug_unwrap(tensor, recurse=False) is tensor


def aside(function: Callable[..., T], *args: Any) -> T:
    """function(*args) in a new thread, where no transform and no mode of the caller is active.

    Transforms wrap even the results of plain tensors, and tracers would record these operations.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()


def _has_storage(tensor: Tensor) -> bool:
    try:
        tensor.untyped_storage()
    except NotImplementedError:  # wrapped by a transform
        return False
    return True

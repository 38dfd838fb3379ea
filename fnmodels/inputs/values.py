"""Reading tensor values on the host under transforms and modes, with public names of torch only."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def has_values(tensor: Any) -> bool:
    """Whether `tensor` is plain, with values in memory: not wrapped by torch.func, not fake, not on meta."""
    return type(tensor) in (Tensor, torch.nn.Parameter) and _has_storage(tensor) and tensor.device.type != "meta"


def readable(tensor: Any) -> bool:
    """Whether Python may read values: not of tensors under vmap, of fake and traced ones, nor on meta."""
    return has_values(unwrapped(tensor))


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured, in which values in memory cannot be read on the host, nor copied from it."""
    return device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing()


def constants(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values as a tensor [len(values)], made on the device where a CUDA graph is captured."""
    if capturing(device):
        return torch.stack([torch.full((), value, dtype=dtype, device=device) for value in values])
    return torch.tensor(values, dtype=dtype, device=device)


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

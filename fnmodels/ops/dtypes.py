"""The dtype in which norms, softmaxes and sums are computed, and where fp64 is, on devices that have none."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from fnmodels import tree

F = TypeVar("F", bound=Callable[..., Any])
WITHOUT_FP64 = ("mps",)  # types of devices that refuse tensors in fp64


def upcast(x: Tensor) -> Tensor:
    """`x` in fp32, or its own dtype if that is wider."""
    return x if x.dtype is torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))


def widest(device: torch.device) -> torch.dtype:
    """fp64, or fp32 on a device that has no fp64."""
    return torch.float32 if device.type in WITHOUT_FP64 else torch.float64


def in_fp64(function: F) -> F:
    """Decorator of a function that computes in fp64 what it returns in a narrower dtype, such as a rotary table.

    Where its tensors are on a device without fp64, it runs on the CPU and its results are moved back.
    """

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        device = None
        for value in (*args, *options.values()):
            if isinstance(value, Tensor):
                device = value.device
                break
        if device is None or device.type not in WITHOUT_FP64:
            return function(*args, **options)
        return _on_the_cpu(function, device, args, options)

    return run  # type: ignore[return-value]


def _on_the_cpu(function: Callable[..., Any], device: torch.device, args: Any, options: Any) -> Any:
    """function(*args, **options) of their copies on the CPU, moved to the device."""
    args = tuple(value.cpu() if isinstance(value, Tensor) else value for value in args)
    options = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in options.items()}
    return tree.map(lambda made: made.to(device), function(*args, **options))

"""Operations of a function on meta tensors: FLOPs of products and attention, bytes read and written, their number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Operations:
    """products, attention: FLOPs. bytes: read and written by other functions of torch. number: of functions."""

    products: float = 0.0
    attention: float = 0.0
    bytes: float = 0.0
    number: float = 0.0

    def __add__(self, other: Operations) -> Operations:
        return self.times(1.0, other)

    def times(self, factor: float, plus: Operations | None = None) -> Operations:
        """factor * self + plus."""
        plus = plus or Operations()
        return Operations(
            factor * self.products + plus.products,
            factor * self.attention + plus.attention,
            factor * self.bytes + plus.bytes,
            factor * self.number + plus.number,
        )


class Counter:
    """Adds up what runs inside of `counting`, and what is added by hand for operations that meta replaces."""

    def __init__(self) -> None:
        self.total = Operations()

    def add(self, **values: float) -> None:
        self.total += Operations(**values)

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        flops = FlopCounterMode(display=False)
        with _Functions(self, flops), flops:
            yield
        self.add(products=flops.get_total_flops())


class _Functions(TorchFunctionMode):
    """Counts torch's functions that write a tensor: those that return a view, or no tensor, cost nothing.

    The bytes of a product are left out: its FLOPs take longer.
    """

    def __init__(self, counter: Counter, flops: FlopCounterMode) -> None:
        super().__init__()
        self.counter, self.flops = counter, flops

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.flops.get_total_flops()
        out = func(*args, **(kwargs or {}))
        made, given = _tensors(out), _tensors((args, kwargs))
        known = {id(tensor.untyped_storage()) for tensor in given}
        made = [tensor for tensor in made if id(tensor.untyped_storage()) not in known]
        if made and given:
            size = 0 if self.flops.get_total_flops() > before else sum(map(_size, made + given))
            self.counter.add(bytes=float(size), number=1.0)
        return out


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

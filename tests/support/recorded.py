"""CUDA graphs on a CPU: a recorder of torch's operations in their place, which runs them again in the same memory."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Recorded(TorchDispatchMode):
    """Records operations, which take effect when they are replayed: what they write in the meantime is undone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError(f"{func} reads values, which a CUDA graph that is captured does not have.")
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = args[place] if place < len(args) else given.get(argument.name)
                self.before += [(t, t.clone()) for t in tree_leaves(written) if isinstance(t, Tensor)]
        made = func(*args, **given)
        self.calls.append((func, args, given, made))
        return made

    def undo(self) -> None:
        for tensor, value in reversed(self.before):
            tensor.copy_(value)

    def pool(self) -> None:
        """Memory is not shared."""

    def replay(self) -> None:
        for func, args, kwargs, made in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@contextlib.contextmanager
def _graph(graph: Recorded, **_: Any) -> Iterator[None]:
    try:
        with graph:
            yield
    finally:
        graph.undo()


class _Stream:
    def __init__(self, device: Any = None) -> None:
        self.device = device

    def wait_stream(self, _: Any) -> None:
        """Nothing runs beside."""


def graphs_on_the_cpu(patch: pytest.MonkeyPatch) -> None:
    """Replaces what captured steps, of decoding and of training, call of torch.cuda."""
    for name, stand_in in {
        "CUDAGraph": Recorded,
        "graph": _graph,
        "Stream": _Stream,
        "current_stream": lambda _: _Stream(),
        "stream": contextlib.nullcontext,
        "device": contextlib.nullcontext,
    }.items():
        patch.setattr(torch.cuda, name, stand_in)

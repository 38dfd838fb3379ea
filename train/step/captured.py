"""A compiled step as one CUDA graph, which is launched at once: launches take longer than the kernels of small models.

The State is donated, so that its tensors stay where they are, and the graph reads and writes them there; the batch is
copied into memory of the graph. torch's own graphs of compiled code (`mode="reduce-overhead"`) say no word where they
leave a function out, such as one that writes into its arguments, and return metrics that the next step overwrites.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.ops.torch_compilation import WARM_UPS, Compiled, beside, capture, fill, gradient_graph
from fnmodels.tree import Tree
from train.batch import Entries

KEPT = 32  # graphs of one step, over shapes and States


def is_on_cuda(tensor: Tensor) -> bool:
    return tensor.is_cuda


class CapturedGraph:
    """`gradient_graph(step)` of (params, opt_state, count, microbatches) as a CUDA graph for each State.

    The batch lies in tensors of its own, which all States share and calls fill in turn.
    """

    def __init__(self, step: Callable[..., Any], captures: "Captures") -> None:
        self._graph, self._captures = gradient_graph(step, captures.around), captures
        self._parts: list[Entries] | None = None

    def __call__(self, params: Tree, opt_state: Tree, count: Tensor, parts: list[Entries]) -> Any:
        with self._captures.in_turn():
            if self._parts is None:
                _check_devices(tree.flatten({"params": params, "opt_state": opt_state, "batch": parts}).items())
                self._parts = tree.map(functools.partial(torch.clone, memory_format=torch.contiguous_format), parts)
            fill(self._parts, parts)
            return self._graph(params, opt_state, count, self._parts)


class Captures:
    """The CUDA graphs of one train step on one device: those used last, in one pool of memory.

    A graph is that of the tensors which it reads and writes, at their addresses: a State of other tensors is captured
    anew. A graph is dropped with the first of its tensors that is freed, and keeps none of them alive.
    """

    def __init__(self, device: torch.device) -> None:
        self._kept: list[_Capture] = []
        self._device, self._stream = device, torch.cuda.Stream(device)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Calls from several streams wait for each other: they share the batch's tensors and the pool."""
        with torch.cuda.device(self._device):
            here = torch.cuda.current_stream(self._device)
            here.wait_stream(self._stream)
            yield
            self._stream.wait_stream(here)

    def around(self, compiled: Compiled) -> Compiled:
        """The compiled code with steps of graphs after its first steps, which warm up."""
        taken = 0

        def run(*inputs: Tensor) -> Sequence[Any]:
            nonlocal taken
            if not taken:
                _check_devices((f"a tensor {list(each.shape)} that they read", each) for each in inputs)
            if taken < WARM_UPS:
                made = beside(self._stream, lambda: compiled(*inputs))
                taken += 1
                return made
            return self._found(compiled, inputs).replay()

        return run

    def _found(self, compiled: Compiled, inputs: Sequence[Tensor]) -> "_Capture":
        places = [tensor.data_ptr() for tensor in inputs]
        found = next((each for each in self._kept if each.is_of(compiled, inputs, places)), None)
        if found is None:
            found = self._capture(compiled, inputs, places)
        else:
            self._kept.remove(found)
        self._kept.append(found)
        del self._kept[:-KEPT]
        return found

    def _capture(self, compiled: Compiled, inputs: Sequence[Tensor], places: list[int]) -> "_Capture":
        pool = self._kept[-1].graph.pool() if self._kept else None
        try:
            graph, outputs = capture(lambda: compiled(*inputs), self._stream, pool)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # The end of a failed capture raises too.
            raise ValueError(_not_captured(error.__context__ or error)) from error
        return _Capture(compiled, [weakref.ref(tensor, self._forget) for tensor in inputs], places, graph, outputs)

    def _forget(self, _: Any) -> None:
        self._kept[:] = [each for each in self._kept if all(tensor() is not None for tensor in each.inputs)]


@dataclass(frozen=True, eq=False)
class _Capture:
    """A graph, of these tensors at these addresses, and the outputs that it writes."""

    compiled: Compiled
    inputs: list["weakref.ref[Tensor]"]
    places: list[int]
    graph: torch.cuda.CUDAGraph
    outputs: Sequence[Any]

    def is_of(self, compiled: Compiled, inputs: Sequence[Tensor], places: list[int]) -> bool:
        same = self.compiled is compiled and self.places == places
        return same and all(mine() is tensor for mine, tensor in zip(self.inputs, inputs, strict=True))

    def replay(self) -> list[Any]:
        self.graph.replay()
        return [value.clone() if isinstance(value, Tensor) else value for value in self.outputs]


def _check_devices(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """ValueError for tensors on the host, of which a graph would keep the values that they have when it is captured."""
    away = [name for name, tensor in tensors if not is_on_cuda(tensor)]
    if away:
        raise ValueError(
            f'compile="step" makes one CUDA graph of loss_fn and optimizer, and {away[0]} is not on the device (one of '
            f'{len(away)} such tensors): move it there, or take compile="whole" or "block".'
        )


def _not_captured(error: BaseException) -> str:
    why = str(error).strip().partition("\n")[0].rstrip(".")
    return (
        f'compile="step" makes one CUDA graph of loss_fn and optimizer, and torch cannot capture it: {why}. What they '
        'read on the host must be a tensor on the device; otherwise take compile="whole" or "block".'
    )

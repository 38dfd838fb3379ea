"""When a Function of ours may stand in for operations of torch's."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

_PLAIN = (Tensor, torch.nn.Parameter)


def alone(*tensors: Tensor) -> bool:
    """Whether these are dense tensors of the CPU, and nothing but reverse-mode autograd looks on.

    False under torch.func's transforms, forward mode, modes of any kind (recorders, tracers, counters, selective
    checkpoints), autocast and compilation: each of them knows torch's operations and would have to be told of ours.
    """
    if torch.compiler.is_compiling():
        return False
    functorch = torch._C._functorch
    return (
        all(type(t) in _PLAIN and t.is_cpu and t.layout is torch.strided for t in tensors)
        and not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()
        and functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and not torch.is_autocast_enabled("cpu")
        and not any(functorch.is_legacy_batchedtensor(t) for t in tensors)
    )


def in_graph(*tensors: Tensor) -> bool:
    """As `alone`, for an operator of ours in a graph that torch.compile traces: none of torch.func's transforms in it.

    False for torch.export, whose graphs run elsewhere and for sizes that are not known yet.
    """
    from .tracing import transforms  # here, for it imports dynamo

    plain = all(type(t) in _PLAIN and t.is_cpu for t in tensors)
    return plain and not torch.compiler.is_exporting() and not torch.is_autocast_enabled("cpu") and not transforms()

"""Names of torch that are private, since there is no public way: each is looked up once, and may be missing.

Without one of them results are the same, and come more slowly. tests/fnmodels/ops/test_torch_internals.py says which of
them the installed torch has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from fnmodels.inputs.values import aside, batched_gradient

T = TypeVar("T")

_PLAIN = (Tensor, torch.nn.Parameter)

# The transforms of torch.func around this call, outermost first: "Grad", "Vmap", "Jvp"; None if unknown. Dynamo enters
# them while it traces, so they are those of the code that it is tracing, and a constant of the graph.
transforms: Callable[[], tuple[str, ...] | None]  # made by __getattr__


def _find(path: str) -> Any:
    """`torch.<path>`, None where this torch has no such name."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# {path below `torch`: what is there}
PRIVATE: dict[str, Any] = {
    path: _find(path)
    for path in (
        "_C._functorch.get_interpreter_stack",
        "_C._functorch.peek_interpreter_stack",
        "_C._len_torch_dispatch_stack",
        "_C._len_torch_function_stack",
        "_grouped_mm",
        "_softmax_backward_data",
        "ops.mkldnn._linear_pointwise",
    )
}
# Operators of aten whose results selective recomputation keeps: products and attention.
COSTLY = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_mm",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def quiet() -> bool:
    """Whether no transform of torch.func and no mode is active: recorders, tracers, counters. False if unknown."""
    functions, dispatches = PRIVATE["_C._len_torch_function_stack"], PRIVATE["_C._len_torch_dispatch_stack"]
    interpreter = PRIVATE["_C._functorch.peek_interpreter_stack"]
    if functions is None or dispatches is None or interpreter is None:
        return False
    return not functions() and not dispatches() and interpreter() is None


def undisturbed(function: Callable[..., T], *args: Any) -> T:
    """function(*args) of plain tensors, outside of all transforms and modes."""
    return function(*args) if quiet() else aside(function, *args)


def alone(*tensors: Tensor) -> bool:
    """Whether these are dense tensors of the CPU, and nothing but reverse-mode autograd looks on.

    False under torch.func's transforms, forward mode, modes of any kind (recorders, tracers, counters, selective
    checkpoints), autocast and compilation: each of them knows torch's operations and would have to be told of ours.
    """
    return (
        not torch.compiler.is_compiling()
        and all(type(t) in _PLAIN and t.is_cpu and t.layout is torch.strided for t in tensors)
        and quiet()
        and not torch.is_autocast_enabled("cpu")
        and not any(batched_gradient(t) or forward_ad.unpack_dual(t).tangent is not None for t in tensors)
    )


def in_graph(*tensors: Tensor) -> bool:
    """As `alone`, for an operator of ours in a graph that torch.compile traces: none of torch.func's transforms in it.

    False for torch.export, whose graphs run elsewhere and for sizes that are not known yet.
    """
    from .torch_internals import transforms  # here, for making it imports dynamo

    plain = all(type(t) in _PLAIN and t.is_cpu for t in tensors)
    return plain and not torch.compiler.is_exporting() and not torch.is_autocast_enabled("cpu") and transforms() == ()


def __getattr__(name: str) -> Any:
    """`transforms`, made when code that is being traced imports it: what marks it as a constant imports dynamo."""
    if name != "transforms":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    marked = torch.compiler.assume_constant_result(_transforms)
    globals()[name] = marked
    return marked


def _transforms() -> tuple[str, ...] | None:
    stack = PRIVATE["_C._functorch.get_interpreter_stack"]
    return None if stack is None else tuple(interpreter.key().name for interpreter in stack() or ())


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear by oneDNN, without a derivative."""
    product = PRIVATE["ops.mkldnn._linear_pointwise"]
    found: Tensor = F.linear(x, weight, bias) if product is None else product(x, weight, bias, "none", [], "")
    return found


def softmax_backward(grad: Tensor, p: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of the scores, in their dtype, given that of p = softmax(scores, -1)."""
    backward = PRIVATE["_softmax_backward_data"]
    if backward is None:
        scaled = grad * p
        return (scaled - p * scaled.sum(-1, keepdim=True)).to(dtype)
    found: Tensor = backward(grad, p, -1, dtype)
    return found


def is_grouped_product(function: Any) -> bool:
    """Whether it is F.grouped_mm, which is written in Python, or what that calls."""
    return function is not None and function in (F.grouped_mm, PRIVATE["_grouped_mm"])


def costly_operators() -> list[Any]:
    """Those of COSTLY that this torch has; what is missing is computed again."""
    return [getattr(torch.ops.aten, name).default for name in COSTLY if hasattr(torch.ops.aten, name)]


def version(tensor: Tensor) -> int:
    """How often it was written into; 0 if unknown."""
    return getattr(tensor, "_version", 0)

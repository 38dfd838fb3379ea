"""Linear layers: F.linear, and for large products on a CPU what is fastest on this machine (`ops.cpu.linear`)."""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from .cpu.linear import is_large, large_linear, large_linear_gelu, linear_in_graph
from .invariant.rows import INVARIANT, invariant_linear
from .torch_internals import is_plain_eager


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] weight^T + bias -> [..., out]; weight [out, in], bias [out]. F.linear except for large products.

    Leaves that are no plain tensor (`params.lora`), and all transforms, therefore see F.linear.
    """
    if torch.compiler.is_compiling():
        return linear_in_graph(x, weight, bias)
    if INVARIANT.get():
        return invariant_linear(x, weight, bias)
    return large_linear(x, weight, bias) if is_large(x, weight) else F.linear(x, weight, bias)


def linears(x: Tensor, weights: Mapping[str, Tensor], names: Iterable[str]) -> tuple[Tensor, ...]:
    """`linear` of x with the weights `name`_proj and biases `name`_bias, which are optional, for each name.

    It is one product where a form of the weights has joined them (`params.packed`).
    """
    given = [(weights[f"{name}_proj"], weights.get(f"{name}_bias")) for name in names]
    joined: Any = getattr(given[0][0], "linears", None)
    if joined is not None and (found := joined(x, given)) is not None:
        return cast("tuple[Tensor, ...]", found)
    if torch.compiler.is_compiling() or INVARIANT.get():
        return tuple([linear(x, weight, bias) for weight, bias in given])
    # `linear` in eager mode, whose questions are asked once
    return tuple([large_linear(x, w, b) if is_large(x, w) else F.linear(x, w, b) for w, b in given])


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, *, approximate: str) -> Tensor:
    """F.gelu(linear(x, weight, bias), approximate=approximate) without gradients, on a CPU in one pass over the result.

    A weight may be a form that has a product with gelu of its own (`params.packed`).
    """
    own = getattr(weight, "linear_gelu", None)
    if own is not None and is_plain_eager(x):
        found: Tensor = own(x, bias, approximate)
        return found
    if (fused := large_linear_gelu(x, weight, bias, approximate)) is not None:
        return fused
    y = linear(x, weight, bias)
    return torch.ops.aten.gelu_(y, approximate=approximate) if is_plain_eager(y) else F.gelu(y, approximate=approximate)

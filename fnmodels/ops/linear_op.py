"""`linear` through oneDNN as an operator, for graphs: Inductor's own lowering of it is for frozen weights alone.

It is used there alone, since torch.func does not see the derivative of an operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .torch_internals import onednn_linear


@torch.library.custom_op("fnmodels::linear", mutates_args=())
def compiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return onednn_linear(x, weight, bias)


@compiled_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _slopes(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    rows = slope.flatten(0, -2)
    return (
        compiled_linear(slope, weight.t(), None) if of_x else None,
        compiled_linear(rows.t(), x.flatten(0, -2).t(), None) if of_weight else None,
        rows.sum(0) if of_bias else None,
    )


compiled_linear.register_autograd(_slopes, setup_context=_keep)

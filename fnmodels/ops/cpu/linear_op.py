"""oneDNN's linear as a custom operator for compiled graphs: Inductor's own lowering supports frozen weights only.

It is used in graphs only, because torch.func does not see the derivative of a custom operator.

Row: train_step, block-compiled.
"""

from typing import Any

import torch
from torch import Tensor

from fnmodels.ops.torch_internals import onednn_linear

from .onednn import product

# What `custom_op` adds to a call takes as long as the product of a few rows, and decoding has no use for it.
torch.library.define("fnmodels::packed_linear", "(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
torch.library.impl("fnmodels::packed_linear", "CompositeExplicitAutograd", onednn_linear)


def _shaped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


torch.library.register_fake("fnmodels::packed_linear", _shaped)


def packed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`onednn_linear` of a weight in oneDNN's layout, as one node of a compiled graph without gradients."""
    found: Tensor = torch.ops.fnmodels.packed_linear(x, weight, bias)
    return found


@torch.library.custom_op("fnmodels::linear", mutates_args=())
def compiled_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return product(x, weight, bias)


compiled_linear.register_fake(_shaped)


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias = ctx.needs_input_grad
    rows = grad_output.flatten(0, -2)
    return (
        compiled_linear(grad_output, weight.t(), None) if needs_x else None,
        compiled_linear(rows.t(), x.flatten(0, -2).t(), None) if needs_weight else None,
        rows.sum(0) if needs_bias else None,
    )


compiled_linear.register_autograd(_backward, setup_context=_save_inputs)

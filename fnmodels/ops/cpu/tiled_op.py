"""Tiled causal attention as a custom operator: one node in a compiled graph, instead of an unrolled loop.

The loop would take longer to compile than the rest of the graph. The operator is used in graphs only, because
torch.func does not see the derivative of a custom operator.

Row: train_step, block-compiled.
"""

from typing import Any

import torch
from torch import Tensor

from .tiled_kernel import save_inputs, tiles_backward, tiles_forward


@torch.library.custom_op("fnmodels::causal_tiles", mutates_args=())
def compiled_tiles(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return tiles_forward(q, k, v, scale)


@compiled_tiles.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


@torch.library.custom_op("fnmodels::causal_tiles_backward", mutates_args=())
def backward_tiles(q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = tiles_backward(q, k, v, grad_output, scale)
    return dq, dk.contiguous(), dv.contiguous()


@backward_tiles.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    return *backward_tiles(*ctx.saved_tensors, grad_output, ctx.scale), None


compiled_tiles.register_autograd(_backward, setup_context=save_inputs)

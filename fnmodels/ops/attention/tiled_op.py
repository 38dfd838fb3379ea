"""`attention_tiles` as an operator: in a compiled graph the tiles are one node.

Unrolled, they would take longer to compile than all the rest. It is used there alone, since torch.func does not see the
derivative of an operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .tiled_kernel import keep_inputs, tiles_backward, tiles_forward


@torch.library.custom_op("fnmodels::causal_tiles", mutates_args=())
def compiled_tiles(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return tiles_forward(q, k, v, scale)


@compiled_tiles.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return q.new_empty(*q.shape[:3], v.shape[3])


@torch.library.custom_op("fnmodels::causal_tiles_backward", mutates_args=())
def backward_tiles(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = tiles_backward(q, k, v, slope, scale)
    return dq, dk.contiguous(), dv.contiguous()


@backward_tiles.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, slope: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _slopes(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
    return *backward_tiles(*ctx.saved_tensors, slope, ctx.scale), None


compiled_tiles.register_autograd(_slopes, setup_context=keep_inputs)

"""The loop over chunks as a custom operator: one node in a compiled graph, instead of an unrolled loop.

Unrolled, a graph grows with the length of the row, and takes minutes to compile. The operator is used in graphs only,
because torch.func does not see the derivative of a custom operator.

Row: recurrent step, block-compiled, the first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import delta_per_head, ssd_chunk
from .chunks import ByHand, scan_backward, scan_forward

# By name, the function of options that makes a chunk and its gradient; autograd does not run inside of an operator.
_BY_HAND: dict[str, Callable[..., ByHand]] = {"delta_per_head": delta_per_head.by_hand, "ssd": ssd_chunk.by_hand}


@torch.library.custom_op("fnmodels::scan", mutates_args=())
def compiled_scan(
    name: str, options: list[float], chunk: int, count: int, of: int, dtype: torch.dtype, tensors: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, the last state, the states before each chunk). tensors: the state, `count` along the sequence, constants.

    of, dtype: of y, as for `scan`.
    """
    state, along, constants = tensors[0], tuple(tensors[1 : 1 + count]), tuple(tensors[1 + count :])
    y = along[of].new_empty(along[of].shape, dtype=dtype)
    return y, *scan_forward(_BY_HAND[name](*options), chunk, y, state, along, constants, keep=True)


@compiled_scan.register_fake
def _(
    name: str, options: list[float], chunk: int, count: int, of: int, dtype: torch.dtype, tensors: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    state, like = tensors[0], tensors[1 + of]
    y, last = like.new_empty(like.shape, dtype=dtype), state.new_empty(state.shape)
    return y, last, state.new_empty((like.shape[1] + chunk - 1) // chunk, *state.shape)


@torch.library.custom_op("fnmodels::scan_backward", mutates_args=())
def backward_scan(
    name: str,
    options: list[float],
    chunk: int,
    count: int,
    tensors: list[Tensor],
    states: Tensor,
    needed: list[bool],
    grads: list[Tensor],
) -> list[Tensor]:
    """The gradients of those tensors that are `needed`."""
    found = scan_backward(_BY_HAND[name](*options), chunk, count, tensors, states, needed, grads)
    return [grad.contiguous() for grad in found if grad is not None]


@backward_scan.register_fake
def _(
    name: str,
    options: list[float],
    chunk: int,
    count: int,
    tensors: list[Tensor],
    states: Tensor,
    needed: list[bool],
    grads: list[Tensor],
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, need in zip(tensors, needed, strict=True) if need]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *ctx.options, _, _, tensors = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.needed = [t.requires_grad for t in tensors]
    ctx.save_for_backward(*tensors, output[2])


def _backward(ctx: Any, grad_y: Tensor, grad_last: Tensor, _: Any) -> tuple[Any, ...]:
    *tensors, states = ctx.saved_tensors
    found = iter(backward_scan(*ctx.options, tensors, states, ctx.needed, [grad_y, grad_last]))
    options: list[Any] | None = None if ctx.options[1] else []  # torch takes an empty list for one of tensors
    return None, options, None, None, None, None, [next(found) if need else None for need in ctx.needed]


compiled_scan.register_autograd(_backward, setup_context=_save)

"""The loop over chunks of the sequence and its backward pass, outside of autograd.

The backward pass recomputes each chunk from the state before it, which is all that is kept of a chunk.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# (state, slices [B, C, ...] of the tensors that run along the sequence, constants) -> (y [B, C, ...], state)
Step = Callable[[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, Tensor]]
# The same by hand, without autograd: (state, slices, constants, the state after, which it writes) -> y. The state after
# may be the one before: a new one of a megabyte takes longer than what is computed on it, for its pages are new.
InPlace = Callable[[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor], Tensor]
# (state, slices, constants, gradient of y, gradient of the state after it) -> gradients of the state, the slices and
# the constants, in this order; None for integers
Gradient = Callable[[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Tensor], tuple[Tensor | None, ...]]


class ByHand(NamedTuple):
    """A step and its gradient, and the name and options under which `scan_op` finds them."""

    step: InPlace
    gradient: Gradient
    name: str
    options: list[float]


@torch.no_grad()
def scan_forward(
    step: InPlace,
    chunk: int,
    state: Tensor,
    along: tuple[Tensor, ...],
    constants: tuple[Tensor, ...],
    *,
    keep: bool,
    into: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, the last state, the states before each chunk [chunks, ...], or none of them).

    into: where y goes, by default a new tensor; it may be one of `along`.
    """
    length, y, last = along[0].shape[1], into, torch.empty_like(state)
    chunks = -(-length // chunk)
    states = state.new_empty((chunks if keep else 0, *state.shape))
    if keep:
        states[0] = state
    for index, start in enumerate(range(0, length, chunk)):
        after = states[index + 1] if keep and index + 1 < chunks else last
        part = step(state, tuple(t[:, start : start + chunk] for t in along), constants, after)
        state = after
        y = part.new_empty(part.shape[0], length, *part.shape[2:]) if y is None else y
        y[:, start : start + chunk] = part
    assert y is not None
    return y, last, states


@torch.no_grad()
def scan_backward(
    gradient: Gradient,
    chunk: int,
    count: int,
    tensors: list[Tensor],
    states: Tensor,
    needed: Sequence[bool],
    grads_after: Sequence[Tensor],
) -> list[Tensor | None]:
    """The gradients of `tensors` (state, `count` along the sequence, constants), None where not `needed`.

    states: those before each chunk, as `scan_forward` keeps them. grads_after: of y and of the last state.
    """
    grad_y, grad_last = grads_after
    along, constants = tensors[1 : 1 + count], tuple(tensors[1 + count :])
    grads: dict[int, Tensor] = {}
    for i, need in enumerate(needed):
        if need:
            grads[i] = (torch.zeros_like if i > count else torch.empty_like)(tensors[i])
    for index in reversed(range(len(states))):
        part = slice(index * chunk, (index + 1) * chunk)
        slices = tuple(t[:, part] for t in along)
        found: Any = gradient(states[index], slices, constants, grad_y[:, part], grad_last)
        grad_last = found[0]
        for i, grad in grads.items():
            if 0 < i <= count:
                grad[:, part] = found[i]
            elif i:
                grad += found[i]
    grads[0] = grad_last
    return [grads[i] if need else None for i, need in enumerate(needed)]

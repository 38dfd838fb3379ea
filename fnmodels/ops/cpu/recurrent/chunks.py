"""The loop over chunks of the sequence and its backward pass, outside of autograd.

The backward pass recomputes each chunk from the state before it, which is all that is kept of a chunk. On a CPU the
loop takes one chunk after the other. On CUDA, where each call takes microseconds whatever its size, a step takes many
chunks, and loops over these only for what depends on the state.

Row: recurrent step.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fnmodels.ops.cpu.blocks import Space

# (state, slices [B, C, ...] of the tensors that run along the sequence, constants) -> (y [B, C, ...], state)
ChunkStep = Callable[[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, Tensor]]

_ELEMENTS = 1 << 24  # of the tensors of pairs of tokens that a step on CUDA makes


_Tensors = tuple[Tensor, ...]


class Given(NamedTuple):
    """The arguments of a step of n chunks of C tokens."""

    slices: _Tensors  # along the sequence, [B, n C, ...]
    prepared: _Tensors  # of these chunks from `ByHand.prepared`, [n, ...]
    constants: _Tensors
    space: Space


# `ChunkStep` by hand, without autograd: (state, given, the states after each of n chunks [n, ...], y) -> None. It
# writes the last two. With n = 1 the state after may be the one before.
InPlace = Callable[[Tensor, Given, Tensor, Tensor], None]
# (states before each of n chunks, given, gradient of y, gradient of the last state, gradients of the slices and
# constants, None where not needed) -> None. It writes those of slices, adds to those of constants, and writes the
# gradient of the first state over that of the last.
Gradient = Callable[[Tensor, Given, Tensor, Tensor, Sequence[Tensor | None]], None]


class ByHand(NamedTuple):
    """A step and its gradient. `scan_op` finds them under a name, with the options that they were made of."""

    # (tensors along the sequence, constants, tokens of a chunk) -> tensors [chunks, ...]: what needs no state and is
    # small is found for all chunks at once
    prepared: Callable[[_Tensors, _Tensors, int], _Tensors]
    step: InPlace
    gradient: Gradient
    together: bool = False  # whether a step takes several chunks
    name: str = ""
    options: tuple[float, ...] = ()


@torch.no_grad()
def scan_forward(
    by: ByHand, chunk: int, y: Tensor, state: Tensor, along: _Tensors, constants: _Tensors, *, keep: bool
) -> tuple[Tensor, Tensor]:
    """(the last state, the states before each chunk [chunks, ...], or none of them).

    y: where the result goes; it may be one of `along`.
    """
    steps, space = _steps(by, state, along, constants, chunk), Space(state)
    last, states = state.new_empty(state.shape), None
    if keep:
        states = state.new_empty(sum(steps.counts) + 1, *state.shape)
        states[0] = state
    first = 0
    for count, slices, prepared, part in zip(*steps[1:], y.split(steps.sizes, 1), strict=True):
        if states is not None:
            after = states[first + 1 : first + 1 + count]
        else:
            after = last[None] if count == 1 else space("after", count, *state.shape)
        by.step(state, Given(slices, prepared, constants, space), after, part)
        state, first = after[-1], first + count
        if states is None and count > 1:  # the next step writes over `after`
            state = last.copy_(state)
    return (last, state.new_empty(0)) if states is None else (last.copy_(state), states[:-1])


class _Steps(NamedTuple):
    """The numbers of tokens and of chunks of each step, and its arguments; a shorter chunk has a step of its own."""

    sizes: list[int]
    counts: list[int]
    slices: list[_Tensors]
    prepared: list[_Tensors]


def _steps(by: ByHand, state: Tensor, along: _Tensors, constants: _Tensors, chunk: int) -> _Steps:
    whole, rest = divmod(along[0].shape[1], chunk)
    most = chunks_at_once(state, chunk) if by.together else 1
    counts = [most] * (whole // most) + [whole % most] * (whole % most > 0)
    sizes, counts = [count * chunk for count in counts] + [rest] * (rest > 0), counts + [1] * (rest > 0)
    slices = list(zip(*(t.split(sizes, 1) for t in along), strict=True))
    prepared = list(zip(*(t.split(counts) for t in by.prepared(along, constants, chunk)), strict=True))
    return _Steps(sizes, counts, slices, prepared or [()] * len(counts))


def chunks_at_once(state: Tensor, chunk: int) -> int:
    """The number of chunks that one step computes."""
    if not state.is_cuda:
        return 1
    return max(1, _ELEMENTS // (state.shape[0] * state.shape[1] * chunk * chunk))


@torch.no_grad()
def scan_backward(
    by: ByHand,
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
    grad_y, grad_state = grads_after[0], grads_after[1].clone(memory_format=torch.contiguous_format)
    along, constants = tuple(tensors[1 : 1 + count]), tuple(tensors[1 + count :])
    make = (torch.empty_like if i < count else torch.zeros_like for i in range(len(tensors) - 1))
    grads = [new(t) if need else None for new, t, need in zip(make, tensors[1:], needed[1:], strict=True)]
    steps, space = _steps(by, tensors[0], along, constants, chunk), Space(states)
    of_slices = list(zip(*(_split(grad, steps.sizes) for grad in grads[:count]), strict=True))
    to = len(states)
    each = zip(*steps[1:], grad_y.split(steps.sizes, 1), of_slices, strict=True)
    for chunks, slices, prepared, of_y, into in reversed(list(each)):
        before, to = states[to - chunks : to], to - chunks
        given = Given(slices, prepared, constants, space)
        by.gradient(before, given, of_y, grad_state, (*into, *grads[count:]))
    return [grad_state if needed[0] else None, *grads]


def _split(x: Tensor | None, sizes: list[int]) -> Sequence[Tensor | None]:
    return [None] * len(sizes) if x is None else x.split(sizes, 1)

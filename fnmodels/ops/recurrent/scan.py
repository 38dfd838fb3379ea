"""The loop over chunks of the sequence, whose backward pass recomputes each chunk from the state before it.

A chunk's inner values (decays and products of pairs of its tokens) take several times the memory of its inputs. The
Function here saves only the inputs and one state per chunk. `kernel="math"` and everything but plain reverse mode run
the same steps as torch's operations.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.autograd_guard import refuse
from fnmodels.ops.torch_internals import alone, in_graph

# (state, slices [B, C, ...] of the tensors that run along the sequence, constants) -> (y [B, C, ...], state)
Step = Callable[[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, Tensor]]
# The same by hand, without autograd: (state, slices, constants, the state after, which it writes) -> y. The state after
# may be the one before: a new one of a megabyte takes longer than what is computed on it, for its pages are new.
InPlace = Callable[[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor], Tensor]
# (state, slices, constants, gradient of y, gradient of the state after it) -> gradients of the state, the slices and
# the constants, in this order; None for integers
Gradient = Callable[[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor, Tensor], tuple[Tensor | None, ...]]
ByHand = tuple[InPlace, Gradient] | None  # None: from `Step`, with autograd's gradient


def earlier_of_document(run: Tensor) -> Tensor:
    """bool [B, C, C] of the runs [B, C] of a chunk's tokens: whether j is of i's document and not later."""
    earlier = torch.ones(run.shape[1], run.shape[1], dtype=torch.bool, device=run.device).tril()
    return (run[:, :, None] == run[:, None, :]) & earlier


def decay_in_document(g: Tensor, same: Tensor) -> Tensor:
    """The log decay of each token [B, C, ...] summed since its document or the chunk began, itself included.

    A product with zeros and ones, so that no bit depends on another document; in fp64, because differences of these
    sums are what counts. same: from `earlier_of_document`.
    """
    return (same.double() @ g.double().flatten(2)).view(g.shape)


def decay_of_pairs(cum: Tensor, same: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(cum_i - cum_j) [..., C, C] of log decays [..., C] in `dtype`; 0 where not `same` [..., C, C]."""
    apart = (cum[..., :, None] - cum[..., None, :]).to(dtype)
    if torch.is_grad_enabled() or not alone(apart, same):
        return decay_of(apart).where(same, 0)
    return torch.threshold_(apart.clamp_(max=0), _least(dtype), -torch.inf).exp_().mul_(same)


def decay_of(log: Tensor) -> Tensor:
    """exp(log), at most 1, and 0 where it is less than 1e-19 (fp32).

    Such factors change no result, but they or products of two are subnormal numbers, on which processors compute about
    a hundred times as long.
    """
    return F.threshold(log.clamp(max=0), _least(log.dtype), -torch.inf).exp()


def _least(dtype: torch.dtype) -> float:
    return 0.5 * math.log(torch.finfo(dtype).tiny)


def scan(
    step: Step,
    state: Tensor,
    along: tuple[Tensor, ...],
    constants: tuple[Tensor, ...] = (),
    *,
    chunk: int,
    kernel: Any = "auto",
    by_hand: ByHand = None,
    node: tuple[str, list[float]] | None = None,
) -> tuple[Tensor, Tensor]:
    """(y [B, S, ...], the last state) of `step` on one chunk of at most `chunk` tokens after the other.

    along: tensors [B, S, ...]. y has the dtype that `step` gives it. kernel: "math" for torch's operations only.
    by_hand: the step and its gradient; by default `step`, and autograd's. node: the name and the options under which
    `scan_op` finds the same, so that the loop is one node of a compiled graph.
    """
    tensors = (state, *along, *constants)
    if along[0].shape[1] <= chunk:
        return step(state, along, constants)
    if kernel != "math" and node is not None and torch.compiler.is_compiling() and in_graph(*tensors):
        from .scan_op import compiled_scan  # imported late: it imports dynamo, which imports sympy

        y, last, _ = compiled_scan(*node, chunk, len(along), list(tensors))
        return y, last
    if kernel == "math" or not alone(*tensors):
        return _written_out(step, chunk, state, along, constants)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        y, last, _ = _Scan.apply(step, by_hand, chunk, len(along), *tensors)
        return y, last
    y, last, _ = scan_forward(in_place(step, by_hand), chunk, state, along, constants, keep=False)
    return y, last


def _written_out(
    step: Step, chunk: int, state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    ys = []
    for parts in zip(*(t.split(chunk, dim=1) for t in along), strict=True):
        y, state = step(state, parts, constants)
        ys.append(y)
    return torch.cat(ys, dim=1), state


@torch.no_grad()
def scan_forward(
    step: InPlace, chunk: int, state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...], *, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, the last state, the states before each chunk [chunks, ...], or none of them)."""
    length, y, last = along[0].shape[1], None, torch.empty_like(state)
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


def in_place(step: Step, by_hand: ByHand) -> InPlace:
    return functools.partial(_copied, step) if by_hand is None else by_hand[0]


def _copied(
    step: Step, state: Tensor, slices: tuple[Tensor, ...], constants: tuple[Tensor, ...], after: Tensor
) -> Tensor:
    """`step` as an `InPlace`."""
    y, new = step(state, slices, constants)
    after.copy_(new)
    return y


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        step: Step, by_hand: ByHand, chunk: int, count: int, state: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return scan_forward(in_place(step, by_hand), chunk, state, tensors[:count], tensors[count:], keep=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.step, ctx.by_hand, ctx.chunk, ctx.count = inputs[:4]
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)  # zeros for the states would take as much memory as they do
        ctx.shape = output[0].shape
        ctx.save_for_backward(*inputs[4:], output[2])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        *tensors, states = ctx.saved_tensors
        grad_last = torch.zeros_like(tensors[0]) if grad_last is None else grad_last
        grad_y = grad_last.new_zeros(()).expand(ctx.shape) if grad_y is None else grad_y
        needed = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():  # a second derivative: differentiate the written out form
            return None, None, None, None, *_differentiable(ctx, tensors, needed, (grad_y, grad_last))
        grads = scan_backward(ctx.step, ctx.by_hand, ctx.chunk, ctx.count, tensors, states, needed, grad_y, grad_last)
        return None, None, None, None, *grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse("auto")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        refuse("auto")


@torch.no_grad()
def scan_backward(
    step: Step,
    by_hand: ByHand,
    chunk: int,
    count: int,
    tensors: list[Tensor],
    states: Tensor,
    needed: Sequence[bool],
    grad_y: Tensor,
    grad_last: Tensor,
) -> list[Tensor | None]:
    """The gradients of `tensors` (state, `count` along the sequence, constants), None where not `needed`.

    states: those before each chunk, as `scan_forward` keeps them.
    """
    along, constants = tensors[1 : 1 + count], tuple(tensors[1 + count :])
    grads: dict[int, Tensor] = {}
    for i, need in enumerate(needed):
        if need:
            grads[i] = (torch.zeros_like if i > count else torch.empty_like)(tensors[i])
    for index in reversed(range(len(states))):
        part = slice(index * chunk, (index + 1) * chunk)
        slices = tuple(t[:, part] for t in along)
        if by_hand is not None:
            found: Mapping[int, Any] = dict(
                enumerate(by_hand[1](states[index], slices, constants, grad_y[:, part], grad_last))
            )
        else:
            found = _by_autograd(step, needed, (states[index], *slices), constants, grad_y[:, part], grad_last)
        grad_last = found[0]
        for i, grad in grads.items():
            if 0 < i <= count:
                grad[:, part] = found[i]
            elif i:
                grad += found[i]
    grads[0] = grad_last
    return [grads[i] if need else None for i, need in enumerate(needed)]


def _by_autograd(
    step: Step,
    needed: Sequence[bool],
    inputs: tuple[Tensor, ...],
    constants: tuple[Tensor, ...],
    grad_y: Tensor,
    grad_last: Tensor,
) -> dict[int, Tensor]:
    """{index: gradient} of the inputs and constants of a step that need one, and of the state."""
    wanted = [i for i, need in enumerate(needed) if need or not i]
    leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate((*inputs, *constants))]
    count = len(inputs)
    with torch.enable_grad():
        results = step(leaves[0], tuple(leaves[1:count]), tuple(leaves[count:]))
    of = [leaves[i] for i in wanted]
    found = torch.autograd.grad(results, of, (grad_y, grad_last), materialize_grads=True, allow_unused=True)
    return dict(zip(wanted, found, strict=True))


def _differentiable(
    ctx: Any, tensors: list[Tensor], needed: tuple[bool, ...], grads: tuple[Tensor, Tensor]
) -> list[Tensor | None]:
    """The gradients as a graph that can be differentiated again."""
    along, constants = tuple(tensors[1 : 1 + ctx.count]), tuple(tensors[1 + ctx.count :])
    results = _written_out(ctx.step, ctx.chunk, tensors[0], along, constants)
    wanted = [t for t, need in zip(tensors, needed, strict=True) if need]
    found = iter(torch.autograd.grad(results, wanted, grads, create_graph=True, materialize_grads=True))
    return [next(found) if need else None for need in needed]

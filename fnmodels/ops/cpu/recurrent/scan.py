"""The loop over chunks of the sequence, whose backward pass recomputes each chunk from the state before it.

A chunk's inner values (decays and products of pairs of its tokens) take several times the memory of its inputs. The
Function here saves only the inputs and one state per chunk. `kernel="math"` and everything but plain reverse mode run
the same steps as torch's operations.

Row: recurrent step.
"""

from __future__ import annotations

from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fnmodels.ops.autograd_guard import refuse
from fnmodels.ops.torch_internals import in_graph, is_plain_eager

from .chunks import ByHand, ChunkStep, Given, scan_backward, scan_forward


class Output(NamedTuple):
    """Shape, dtype and memory of the y that a scan writes."""

    of: int  # the index of the tensor along the sequence whose shape it has
    dtype: torch.dtype
    # The caller does not read that tensor again: y may take its place where no gradient is needed.
    overwrite: bool = False


def scan(
    step: ChunkStep,
    state: Tensor,
    along: tuple[Tensor, ...],
    constants: tuple[Tensor, ...] = (),
    *,
    chunk: int,
    kernel: Any = "auto",
    y: Output,
    by_hand: ByHand | None = None,
) -> tuple[Tensor, Tensor]:
    """(y [B, S, ...], the last state) of `step` on one chunk of at most `chunk` tokens after the other.

    along: tensors [B, S, ...]. kernel: "math" for torch's operations only. by_hand: the step and its gradient, with
    which the loop is one node of a compiled graph; by default `step`, and autograd's.
    """
    tensors = (state, *along, *constants)
    of, dtype, overwrite = y
    if along[0].shape[1] <= chunk:
        return step(state, along, constants)
    if kernel != "math" and by_hand is not None and torch.compiler.is_compiling() and in_graph(*tensors, cuda=True):
        from .scan_op import compiled_scan  # imported late: it imports dynamo, which imports sympy

        results = compiled_scan(by_hand.name, list(by_hand.options), chunk, len(along), of, dtype, list(tensors))
        return results[0], results[1]
    if kernel == "math" or not is_plain_eager(*tensors, cuda=by_hand is not None):
        return _written_out(step, chunk, state, along, constants)
    by = _by_autograd(step, tuple(t.requires_grad for t in tensors)) if by_hand is None else by_hand
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        made, last, _ = _Scan.apply(step, by, chunk, len(along), of, dtype, *tensors)
        return made, last
    into = along[of] if overwrite and along[of].dtype == dtype else along[of].new_empty(along[of].shape, dtype=dtype)
    last, _ = scan_forward(by, chunk, into, state, along, constants, keep=False)
    return into, last


def _written_out(
    step: ChunkStep, chunk: int, state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    ys = []
    for parts in zip(*(t.split(chunk, dim=1) for t in along), strict=True):
        y, state = step(state, parts, constants)
        ys.append(y)
    return torch.cat(ys, dim=1), state


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        step: ChunkStep,
        by: ByHand,
        chunk: int,
        count: int,
        of: int,
        dtype: torch.dtype,
        state: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        y = tensors[of].new_empty(tensors[of].shape, dtype=dtype)
        return y, *scan_forward(by, chunk, y, state, tensors[:count], tensors[count:], keep=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.step, ctx.by, ctx.chunk, ctx.count = inputs[:4]
        ctx.mark_non_differentiable(output[2])
        ctx.set_materialize_grads(False)  # zeros for the states would take as much memory as they do
        ctx.shape = output[0].shape
        ctx.save_for_backward(*inputs[6:], output[2])

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_last: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        *tensors, states = ctx.saved_tensors
        grad_last = torch.zeros_like(tensors[0]) if grad_last is None else grad_last
        grad_y = grad_last.new_zeros(()).expand(ctx.shape) if grad_y is None else grad_y
        needed = ctx.needs_input_grad[6:]
        if torch.is_grad_enabled():  # a second derivative: differentiate the written out form
            return *[None] * 6, *_differentiable(ctx, tensors, needed, (grad_y, grad_last))
        grads = scan_backward(ctx.by, ctx.chunk, ctx.count, tensors, states, needed, (grad_y, grad_last))
        return *[None] * 6, *grads

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse("auto")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> NoReturn:
        refuse("auto")


def _by_autograd(step: ChunkStep, needed: tuple[bool, ...]) -> ByHand:
    """`step` and autograd's gradient. needed: of the state, the tensors along the sequence and the constants."""
    differentiated = [i for i, need in enumerate(needed) if need or not i]

    def in_place(state: Tensor, given: Given, after: Tensor, y: Tensor) -> None:
        part, new = step(state, given.slices, given.constants)
        y.copy_(part)
        after[0].copy_(new)

    def gradient(states: Tensor, given: Given, of_y: Tensor, of_state: Tensor, into: Any) -> None:
        tensors = (states[0], *given.slices, *given.constants)
        leaves = [t.detach().requires_grad_(i in differentiated) for i, t in enumerate(tensors)]
        count = 1 + len(given.slices)
        with torch.enable_grad():
            results = step(leaves[0], tuple(leaves[1:count]), tuple(leaves[count:]))
        of = [leaves[i] for i in differentiated]
        gradients = torch.autograd.grad(results, of, (of_y, of_state), materialize_grads=True, allow_unused=True)
        for i, grad in zip(differentiated, gradients, strict=True):
            if not i:
                of_state.copy_(grad)
            elif i < count:
                into[i - 1].copy_(grad)
            else:
                into[i - 1].add_(grad)

    return ByHand(lambda along, constants, chunk: (), in_place, gradient)


def _differentiable(
    ctx: Any, tensors: list[Tensor], needed: tuple[bool, ...], grads: tuple[Tensor, Tensor]
) -> list[Tensor | None]:
    """The gradients as a graph that can be differentiated again."""
    along, constants = tuple(tensors[1 : 1 + ctx.count]), tuple(tensors[1 + ctx.count :])
    results = _written_out(ctx.step, ctx.chunk, tensors[0], along, constants)
    inputs = [t for t, need in zip(tensors, needed, strict=True) if need]
    gradients = iter(torch.autograd.grad(results, inputs, grads, create_graph=True, materialize_grads=True))
    return [next(gradients) if need else None for need in needed]

"""`make_step(compile="step")`: loss, gradient, clipping and update as one graph, which writes into the State's tensors.

A compiled loss leaves the optimizer, the clipping and the bookkeeping of trees to Python, which at two layers takes
longer than the graph. Here Python passes the State's trees and the batch to one call. The graph is that of the eager
step's functions: `train.update.update` with the optimizer's pure `update`.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.layout import Layout
from fnmodels.ops.torch_compilation import gradient_graph, trace_errors, traces_gradients
from fnmodels.run_params import RunParams
from fnmodels.tree import Tree
from train.batch import Batches, Entries, microbatches
from train.gradients import Leaves, LossFn, Metrics, Sums, checked_loss, gradient_sums, joined, valid_count
from train.loss import ModelLoss, caller, layout_of
from train.optim.base import Optimizer, global_norm
from train.state import State, consume
from train.update import (
    StepFunction,
    StepOptions,
    UpdatePlan,
    check_reached,
    check_state,
    refuse_transforms,
    update,
)

Layouts = tuple[Layout | None, ...]  # of each microbatch
Graph = Callable[[Tree, Tree, Tensor, list[Entries]], tuple[State | None, Metrics]]


def make_step_graph(loss_fn: LossFn, optimizer: Optimizer, options: StepOptions) -> StepFunction:
    """The step of `train.make_step(compile="step")` in one process.

    Each size of a batch has a graph, which is compiled when the size is first seen, after one gradient outside of the
    graph: it finds what a graph would pass over, such as a loss that does not reach a parameter.
    """
    _check_options(options)
    loss = caller(loss_fn, counts=options.balance_rate is not None)
    sums_of = gradient_sums(loss_fn, optimizer, counts=options.balance_rate is not None)
    graphs: dict[Any, Graph] = {}
    last: weakref.ref[State] | None = None

    def graph_of(state: State, parts: list[Entries]) -> Graph:
        layouts = tuple(map(layout_of, parts))
        key = (layouts, *((path, t.shape, t.dtype) for part in parts for path, t in tree.flatten(part).items()))
        if key not in graphs:
            check_reached(sums_of(state.params, parts))
            graphs[key] = gradient_graph(functools.partial(_step, loss, optimizer, options, layouts))
        return graphs[key]

    def step(state: State, batch: Batches) -> tuple[State, Metrics]:
        nonlocal last
        refuse_transforms()
        if last is None or last() is not state:
            check_state(optimizer, state)
        parts = microbatches(batch, options.accumulate)
        run = graph_of(state, parts)
        try:
            with torch.no_grad():
                after, metrics = run(state.params, state.opt_state, state.step, parts)
        except trace_errors() as error:
            raise ValueError(_untraced(error)) from error
        if after is None:
            after = State(state.step, state.params, state.opt_state)
            consume(state)
        last = weakref.ref(after)
        return after, metrics

    return step


def _check_options(options: StepOptions) -> None:
    """ValueError for options that one graph cannot have."""
    if options.remat != "none":
        raise ValueError(
            f'remat={options.remat!r} is not for compile="step", whose graph holds forward and backward pass: take '
            'remat="none", or compile="block" or "whole".'
        )
    if not traces_gradients():
        raise ValueError(
            f'compile="step" needs a torch that traces torch.autograd.grad, as 2.13 does; this is {torch.__version__}.'
        )


def _step(
    loss: ModelLoss,
    optimizer: Optimizer,
    options: StepOptions,
    layouts: Layouts,
    params: Tree,
    opt_state: Tree,
    count: Tensor,
    parts: list[Entries],
) -> tuple[State | None, Metrics]:
    """(the next State, or None where it was written into these tensors; the metrics): what is traced."""
    state, leaves = State(count, params, opt_state), Leaves.of(params, optimizer)
    sums = None
    for part, layout in zip(parts, layouts, strict=True):
        more = _gradients(loss.with_options(blocks={"layout": layout}), leaves, part, lone=len(parts) == 1)
        sums = more if sums is None else _added(sums, more)
    assert sums is not None
    after, metrics = update(
        optimizer,
        state,
        sums,
        plan=UpdatePlan(params, opt_state, leaves, None, lambda: True),
        clip=options.clip,
        inplace=False,
        balance_rate=options.balance_rate,
        norm_of=global_norm,
    )
    if not options.inplace:
        return after, metrics
    _write(state, after)
    return None, metrics


def _write(state: State, after: State) -> None:
    """The values of `after` into the tensors of `state`, where Inductor computes them."""
    for part in ("params", "opt_state", "step"):
        pairs = zip(tree.leaves(getattr(state, part)), tree.leaves(getattr(after, part)), strict=True)
        for tensor, value in pairs:
            if tensor is not value:
                tensor.copy_(value)


def _gradients(loss: ModelLoss, leaves: Leaves, part: Entries, *, lone: bool) -> Sums:
    """`Sums` of one microbatch. lone: divided by its count."""
    with torch.enable_grad():
        given, trained = leaves.fresh()
        entered = RunParams(given if loss.params is None else loss.params(given), loss.options)
        total, count, *aux = checked_loss(loss.function(entered, part))
        value = total / valid_count(total, count).to(total.dtype) if lone else total
        found = torch.autograd.grad(value, trained, allow_unused=True)
    grads = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(trained, found, strict=True)]
    if not lone:
        grads = [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    return Sums(total.detach(), count, tree.map(Tensor.detach, aux[0]) if aux else None, grads, lone, frozenset(), [])


def _added(one: Sums, other: Sums) -> Sums:
    grads = [first + second for first, second in zip(one.grads, other.grads, strict=True)]
    total, count, aux = one.total + other.total, one.count + other.count, joined(one.aux, other.aux)
    return Sums(total, count, aux, grads, False, frozenset(), [])


def _untraced(error: Exception) -> str:
    why = str(error).strip().partition("\n")[0].rstrip(".")
    return (
        f'compile="step" makes one graph of loss_fn and optimizer, and torch cannot trace these: {why}. What they read '
        'on the host, such as int(step) in a schedule, must be a tensor; otherwise take compile="whole" or "block".'
    )

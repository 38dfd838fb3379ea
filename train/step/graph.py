"""`make_step(compile="step")`: loss, gradient, clipping and update as one graph, which writes into the State's tensors.

A compiled loss leaves the optimizer, the clipping and the bookkeeping of trees to Python, which at two layers takes
longer than the graph. Here Python passes the State's trees and the batch to one call. The graph is that of the eager
step's functions: `train.update.update` with the optimizer's pure `update`.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
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
    StepOptions,
    UpdatePlan,
    check_reached,
    check_state,
    refuse_transforms,
    update,
)

from .captured import CapturedGraph, Captures, is_on_cuda
from .many import PlannedStep

Layouts = tuple[Layout | None, ...]  # of each microbatch
Graph = Callable[[Tree, Tree, Tensor, list[Entries]], tuple[State | None, Metrics]]


class GraphStep:
    """The step of `train.make_step(compile="step")` in one process.

    Each size of a batch has a graph for each structure of the params. It is compiled when both are first seen together,
    after one gradient outside of the graph: that finds what a graph would pass over, such as a loss that does not reach
    a parameter.
    """

    def __init__(self, loss_fn: LossFn, optimizer: Optimizer, options: StepOptions) -> None:
        _check_options(options)
        counts = options.balance_rate is not None
        self._loss, self._optimizer, self._options = caller(loss_fn, counts=counts), optimizer, options
        self._sums_of = gradient_sums(loss_fn, optimizer, counts=counts)
        self._structures: dict[tuple[Any, ...], int] = {}  # of paths, shapes, dtypes and devices
        self._graphs: dict[Any, Graph] = {}
        self._checked: dict[Any, Graph] = {}
        self._captures: dict[torch.device, Captures] = {}
        self._last: tuple[weakref.ref[State], Tree, Callable[[], bool], int] | None = None

    def __call__(self, state: State, batch: Batches) -> tuple[State, Metrics]:
        refuse_transforms()
        structure = self._structure_of(state)
        return self._run(*self._graph_of(state, structure, batch), structure, state)

    def planned(self, state: State, batches: Sequence[Batches], alike: bool) -> list[PlannedStep]:
        """Steps of these batches, the first from this State; what can be checked is, before any of them runs.

        alike: the tensors of all batches have the same sizes, strides and dtypes. From its second batch on, a graph is
        then called without its guards.
        """
        refuse_transforms()
        structure = self._structure_of(state)
        graphs = [self._graph_of(state, structure, batch) for batch in batches]
        # In place, the same State and such a batch pass the guards again that these have passed before.
        seen: set[Graph] = set()
        steps = []
        for graph, parts in graphs:
            run = functools.partial(self._run, graph, parts, structure)
            steps.append(PlannedStep(run, known=alike and self._options.inplace and graph in seen))
            seen.add(graph)
        return steps

    def _structure_of(self, state: State) -> int:
        """The number of the params' structure. The State is checked, but for one that the last step left so."""
        if self._last is not None:
            last, _, unchanged, structure = self._last
            if last() is state and unchanged():
                return structure
        check_state(self._optimizer, state)
        leaves = tuple((path, t.shape, t.dtype, t.device) for path, t in tree.flatten(state.params).items())
        return self._structures.setdefault(leaves, len(self._structures))

    def _graph_of(self, state: State, structure: int, batch: Batches) -> tuple[Graph, list[Entries]]:
        """(the graph of a batch and such params, the microbatches)."""
        parts = microbatches(batch, self._options.accumulate)
        layouts = tuple(map(layout_of, parts))
        sizes = ((path, t.shape, t.dtype) for part in parts for path, t in tree.flatten(part).items())
        key = (layouts, structure, *sizes)
        graph = self._checked.get(key)
        if graph is None:
            sums = self._sums_of(state.params, parts)
            check_reached(sums)
            if (graph := self._graphs.get(key)) is None:
                graph = self._graphs[key] = self._compiled(layouts, state.step)
            if sums.count > 0:  # without valid tokens nothing is checked
                self._checked[key] = graph
        return graph, parts

    def _compiled(self, layouts: Layouts, count: Tensor) -> Graph:
        step = functools.partial(_step, self._loss, self._optimizer, self._options, layouts)
        if not is_on_cuda(count) or not self._options.inplace:  # else each State is in new tensors
            return gradient_graph(step)
        captures = self._captures.get(count.device) or Captures(count.device)
        self._captures[count.device] = captures
        return CapturedGraph(step, captures)

    def _run(self, graph: Graph, parts: list[Entries], structure: int, state: State) -> tuple[State, Metrics]:
        try:
            with torch.no_grad():
                after, metrics = graph(state.params, state.opt_state, state.step, parts)
        except trace_errors() as error:
            raise ValueError(_untraced(error)) from error
        if after is None:
            after = State(state.step, state.params, state.opt_state)
            consume(state)
        self._keep(after, structure)
        return after, metrics

    def _keep(self, after: State, structure: int) -> None:
        """Expects `after`, whose params have this structure, as the next State."""
        params = after.params
        same = self._last is not None and self._last[1] is params and self._last[2]()
        unchanged = self._last[2] if self._last is not None and same else tree.watch(params)
        self._last = weakref.ref(after, self._forget), params, unchanged, structure

    def _forget(self, _: Any) -> None:  # the params of a State that nobody has
        self._last = None


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

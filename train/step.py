"""The train step: gradients of sums over microbatches, one division by the global count, one update.

    step = make_step(functools.partial(next_token_loss, config=config), adamw(3e-4), clip=1.0)
    state = init_state(params, optimizer)
    state, metrics = step(state, batch)

Remat and compilation reach the model through the loss function's `layer_fn`, so nothing is patched. The two halves can
be called apart: `train.gradients.gradient_sums`, and `update` with what it returns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fnmodels.tree import Tree
from train.optim.base import Optimizer, check_optimizer
from train.parallel.eval_steps import make_eval_over, make_forward_over
from train.parallel.mesh import Mesh, Parallelism, Strategy
from train.parallel.step import make_step_over

from .gradients import LossFn, gradient_sums, metrics_of, totals
from .loss_call import Batch, caller, microbatches
from .state import State
from .update import Step, StepOptions, check_state, update


def make_step(
    loss_fn: LossFn,
    optimizer: Optimizer,
    *,
    accumulate: int = 1,
    clip: float | None = None,
    remat: str = "none",
    compile: str = "none",
    inplace: bool = True,
    balance_rate: float | None = None,
    mesh: Mesh | None = None,
    strategy: Strategy | None = None,
) -> Step:
    """A function step(state, batch) -> (state, metrics).

    loss_fn(params, batch) -> (sum, count) or (sum, count, aux), aux a tree of sums. Any function that runs the model by
        fnmodels.hidden or forward with the params that it is given: these carry what the step adds (remat, compilation,
        layouts, a mesh), see `train.losses.model_loss`. Options that the loss gives itself are kept, or wrapped.
    batch: a dict of [B, S], or of [1, T] with packed documents; or a list of such, of any lengths: microbatches that
        the caller has cut, which make one step together.
    accumulate: the rows of the batch are taken in this many parts, as equal as can be; gradients are summed in fp32 at
        least and divided once by the number of valid tokens of the whole batch, so that any split gives the same step.
        Memory is that of the largest part and one copy of the gradients, however many parts there are.
    clip: the largest global norm of the gradient; None: none.
    remat: "none"; "full": a layer keeps its input only; "every:N": every Nth layer of each kind does; "selective":
        layers keep the results of matmuls and attention and recompute what lies between.
    compile: "none"; "block": one compilation per kind of layer; "whole": the loss as one graph. Only the layout of rows
        that are one document from position 0 is passed to compiled code (others would compile anew for each batch).
    inplace: the State that goes in is used up and its tensors are written (see `State`). False leaves it as it was, at
        the cost of a copy of parameters and optimizer state.
    balance_rate: after each update every layer's `selection_bias` goes up by this for experts that got fewer tokens of
        the batch than the mean, down for the others (`update_bias`). The loss function must then
        give counts [sparse layers, E] in its aux, as `next_token_loss` does. None: the biases stay.
    mesh: over many processes, see `train.parallel.step`: the State's leaves are DTensors, the batch is the whole one in
        every process, and so are the metrics. strategy: how they share the work, where there is a choice.

    metrics, 0-d tensors: loss (mean over valid tokens, before the update), count, grad_norm (before clipping), lr,
    finite; aux, summed, where there is one; and lr_of, the rate of each group of `partition`. Where the loss or the
    norm is not finite, the parameters and the optimizer's state keep their bits, `finite` is False, and the step counts
    as made. A part without valid tokens adds nothing, and a batch of such alone has loss 0 and gradient 0. Any other
    must reach each leaf that trains by at least one of its parts, or a ValueError names those that would only decay;
    over a mesh, where gathered leaves always have a gradient, this is not checked.
    With an optimizer that has `apply_`, nothing waits for the device but the making of a layout.
    """
    options = StepOptions(accumulate, clip, remat, compile, inplace, balance_rate)
    check_optimizer(optimizer)
    check_strategy(mesh, strategy)
    if mesh is not None:
        return make_step_over(Parallelism(mesh, strategy or Strategy()), loss_fn, optimizer, options)
    sums_of = gradient_sums(loss_fn, optimizer, remat=remat, compile=compile, counts=balance_rate is not None)
    last: weakref.ref[State] | None = None

    def step(state: State, batch: Batch | Sequence[Batch]) -> tuple[State, dict[str, Any]]:
        nonlocal last
        if last is None or last() is not state:  # what this step returned has the structure of what it was given
            check_state(optimizer, state)
        sums = sums_of(state.params, microbatches(batch, accumulate))
        after, metrics = update(optimizer, state, sums, clip=clip, inplace=inplace, balance_rate=balance_rate)
        last = weakref.ref(after)
        return after, metrics

    return step


def check_strategy(mesh: Mesh | None, strategy: Strategy | None) -> None:
    if mesh is None and strategy is not None:
        raise ValueError(f"{strategy} is for many processes: it needs a mesh.")


def make_eval_step(
    loss_fn: LossFn, *, compile: str = "none", mesh: Mesh | None = None, strategy: Strategy | None = None
) -> Callable[[Tree, Batch | Sequence[Batch]], dict[str, Any]]:
    """A function eval_step(params, batch) -> {loss, total, count} and aux where the loss has one.

    loss_fn, compile, batch, mesh, strategy: as in `make_step`; a list is of any lengths. `loss` is the mean over the
    valid tokens of all of it, `total` their sum, so that totals and counts of several calls add up. No gradient, no
    graph.
    """
    check_strategy(mesh, strategy)
    if mesh is not None:
        return make_eval_over(Parallelism(mesh, strategy or Strategy()), loss_fn, compile)
    call = caller(loss_fn, compile=compile)

    @torch.no_grad()
    def eval_step(params: Tree, batch: Batch | Sequence[Batch]) -> dict[str, Any]:
        return metrics_of(*totals(call, params, microbatches(batch)))

    return eval_step


def make_forward_only(
    function: Callable[..., Any], *, compile: str = "none", mesh: Mesh | None = None, strategy: Strategy | None = None
) -> Callable[[Tree, Batch | Sequence[Batch]], Any]:
    """A function run(params, batch) -> function(params, batch) without gradients; of a list, the list of results.

    function: `token_logprobs`, a loss, anything of (params, batch) that runs the model as a loss does; what it returns
    is passed on as it is. compile, mesh, strategy: as in `make_step`; over a mesh that shards batches it must return
    tensors [B, S, ...].
    """
    check_strategy(mesh, strategy)
    if mesh is not None:
        return make_forward_over(Parallelism(mesh, strategy or Strategy()), function, compile)
    call = caller(function, compile=compile)

    @torch.no_grad()
    def run(params: Tree, batch: Batch | Sequence[Batch]) -> Any:
        found = [call(params, part) for part in microbatches(batch)]
        return found if isinstance(batch, (list, tuple)) else found[0]

    return run

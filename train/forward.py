"""Steps that learn nothing: a loss, or a function of each token, by the same calls as in training.

    eval_step = make_eval_step(functools.partial(next_token_loss, config=config))
    loss = eval_step(state.params, batch)["loss"]
    run = make_forward_only(functools.partial(token_logprobs, config=config))
    logp, entropy, valid = run(state.params, batch)

They take parameters and no State, so that other weights than the newest, such as their average, can be looked at.
With `mesh=` the parameters are DTensors, and the batch and the results are whole in every process, as in `make_step`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fnmodels.tree import Tree
from train.parallel.mesh import Mesh, Strategy

from .gradients import LossFn, checked_loss, joined, valid_count
from .loss_call import Batch, caller, microbatches
from .step import check_strategy


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
        from train.parallel.eval_steps import make_eval_over

        return make_eval_over(mesh, loss_fn, compile=compile, strategy=strategy or Strategy())
    call = caller(loss_fn, compile=compile)

    @torch.no_grad()
    def eval_step(params: Tree, batch: Batch | Sequence[Batch]) -> dict[str, Any]:
        return metrics_of(*totals(call, params, microbatches(batch)))

    return eval_step


def totals(call: Callable[[Tree, Batch], Any], params: Tree, parts: Sequence[Batch]) -> tuple[Any, ...]:
    """(sum, count[, aux]) of all parts."""
    (total, count, *aux), *rest = (checked_loss(call(params, part)) for part in parts)
    for more, number, *others in rest:
        total, count = total + more, count + number
        aux = [joined(one, other) for one, other in itertools.zip_longest(aux, others)]
    return (total, count, *aux)


def metrics_of(total: Tensor, count: Tensor, *aux: Tree) -> dict[str, Any]:
    metrics = {"loss": total / valid_count(total, count), "total": total, "count": count}
    return metrics | ({"aux": aux[0]} if aux else {})


def make_forward_only(
    function: Callable[..., Any], *, compile: str = "none", mesh: Mesh | None = None, strategy: Strategy | None = None
) -> Callable[[Tree, Batch | Sequence[Batch]], Any]:
    """A function run(params, batch) -> function(params, batch) without gradients; of a list, the list of results.

    function: `token_logprobs`, a loss, anything of (params, batch). Its keywords `layer_fn` and `layout` are filled in
    as `make_step` does, and what it returns is passed on as it is. compile, mesh, strategy: as in `make_step`; over a
    mesh that divides batches it must return tensors [B, S, ...], and over `pp` it must be a functools.partial of
    `token_logprobs`, or a `train.parallel.pipeline.gradients.Staged`.
    """
    check_strategy(mesh, strategy)
    if mesh is not None:
        from train.parallel.eval_steps import make_forward_over

        return make_forward_over(mesh, function, compile=compile, strategy=strategy or Strategy())
    call = caller(function, compile=compile)

    @torch.no_grad()
    def run(params: Tree, batch: Batch | Sequence[Batch]) -> Any:
        found = [call(params, part) for part in microbatches(batch)]
        return found if isinstance(batch, (list, tuple)) else found[0]

    return run

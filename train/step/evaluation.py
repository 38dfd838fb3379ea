"""Steps for evaluation and forward-only calls."""

from collections.abc import Callable
from typing import Any

import torch

from fnmodels.tree import Tree
from train.batch import Batches, microbatches
from train.gradients import LossFn, Metrics, metrics_of, totals
from train.loss import caller
from train.parallel.eval_steps import make_eval_over, make_forward_over
from train.parallel.mesh import Mesh, Parallelism, Strategy


def check_strategy(mesh: Mesh | None, strategy: Strategy | None) -> None:
    if mesh is None and strategy is not None:
        raise ValueError(f"{strategy} is for many processes: it needs a mesh.")


def make_eval_step(
    loss_fn: LossFn, *, compile: str = "none", mesh: Mesh | None = None, strategy: Strategy | None = None
) -> Callable[[Tree, Batches], Metrics]:
    """A function eval_step(params, batch) -> {loss, total, count}, and aux where the loss returns one.

    loss_fn, compile, batch, mesh, strategy: as in `make_step`. `loss` is the mean over the valid tokens of the batch or
    of the list of batches, `total` their sum, so that totals and counts of several calls can be added. No gradients are
    computed.
    """
    check_strategy(mesh, strategy)
    if mesh is not None:
        return make_eval_over(Parallelism(mesh, strategy or Strategy()), loss_fn, compile)
    call = caller(loss_fn, compile=compile)

    @torch.no_grad()
    def eval_step(params: Tree, batch: Batches) -> Metrics:
        return metrics_of(*totals(call, params, microbatches(batch)))

    return eval_step


def make_forward_only(
    function: Callable[..., Any], *, compile: str = "none", mesh: Mesh | None = None, strategy: Strategy | None = None
) -> Callable[[Tree, Batches], Any]:
    """A function run(params, batch) -> function(params, batch) without gradients; for a list, the list of results.

    function: `token_logprobs`, a loss, or another function of (params, batch) that runs the model as a loss does; its
    result is returned unchanged. compile, mesh, strategy: as in `make_step`; over a mesh that shards batches the
    function must return tensors [B, S, ...].
    """
    check_strategy(mesh, strategy)
    if mesh is not None:
        return make_forward_over(Parallelism(mesh, strategy or Strategy()), function, compile)
    call = caller(function, compile=compile)

    @torch.no_grad()
    def run(params: Tree, batch: Batches) -> Any:
        found = [call(params, part) for part in microbatches(batch)]
        return found if isinstance(batch, (list, tuple)) else found[0]

    return run

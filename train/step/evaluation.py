"""Steps for evaluation and forward-only calls."""

from collections.abc import Callable
from typing import Any

from fnmodels.tree import Tree
from train.batch import Batches, microbatches
from train.gradients import LossFn, Metrics, metrics_of, totals
from train.loss import caller
from train.parallel.eval_steps import make_eval_over, make_forward_over
from train.parallel.mesh import Mesh, Parallelism, Strategy
from train.state import without_gradients


def check_strategy(mesh: Mesh | None, strategy: Strategy | None) -> None:
    if mesh is None and strategy is not None:
        raise ValueError(f"{strategy} is for many processes: it needs a mesh.")


def make_eval_step(
    loss_fn: LossFn, *, compile: str = "none", mesh: Mesh | None = None, strategy: Strategy | None = None
) -> Callable[[Tree, Batches], Metrics]:
    """Makes eval_step(params, batch) -> metrics, which computes a loss without gradients, but those of a transform.

    Args:
        loss_fn: (params, batch) -> (sum, count) or (sum, count, aux), as for `make_step`.
        compile: "none", "block" (one compilation per kind of layer) or "whole" (the loss as one graph).
        mesh: The sizes of a mesh of ranks, each of which passes the full batch; None: one process.
        strategy: How the ranks of the mesh share the work; None: the defaults of `Strategy`.

    Returns:
        The function of (params, batch or list of batches). Its result has `loss`, the mean over all valid tokens,
        `total`, their sum, and `count`, all 0-d, and `aux` where the loss returns one. Totals and counts of several
        calls can be added.

    Raises:
        ValueError: `compile` is another word, or there is a strategy without a mesh.
    """
    check_strategy(mesh, strategy)
    if mesh is not None:
        return make_eval_over(Parallelism(mesh, strategy or Strategy()), loss_fn, compile)
    call = caller(loss_fn, compile=compile)

    def eval_step(params: Tree, batch: Batches) -> Metrics:
        with without_gradients():
            return metrics_of(*totals(call, params, microbatches(batch)))

    return eval_step


def make_forward_only(
    function: Callable[..., Any], *, compile: str = "none", mesh: Mesh | None = None, strategy: Strategy | None = None
) -> Callable[[Tree, Batches], Any]:
    """Makes run(params, batch) -> function(params, batch), which computes without gradients, but those of a transform.

    Args:
        function: `token_logprobs`, a loss, or another function of (params, batch) that runs the model as a loss does.
            Over a mesh that shards batches it must return tensors [B, S, ...].
        compile: "none", "block" (one compilation per kind of layer) or "whole" (the function as one graph).
        mesh: The sizes of a mesh of ranks, each of which passes the full batch; None: one process.
        strategy: How the ranks of the mesh share the work; None: the defaults of `Strategy`.

    Returns:
        The function of (params, batch); for a list of batches it returns the list of results. Results are those of
        `function`, unchanged.

    Raises:
        ValueError: `compile` is another word, or there is a strategy without a mesh.
    """
    check_strategy(mesh, strategy)
    if mesh is not None:
        return make_forward_over(Parallelism(mesh, strategy or Strategy()), function, compile)
    call = caller(function, compile=compile)

    def run(params: Tree, batch: Batches) -> Any:
        with without_gradients():
            found = [call(params, part) for part in microbatches(batch)]
        return found if isinstance(batch, (list, tuple)) else found[0]

    return run

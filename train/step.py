"""The train step, and steps for evaluation and forward-only calls.

    step = make_step(functools.partial(next_token_loss, config=config), adamw(3e-4), clip=1.0)
    state = init_state(params, optimizer)
    state, metrics = step(state, batch)

A train step sums gradients over microbatches, divides once by the global count and updates once. Its two halves are
also public: `train.gradients.gradient_sums` and `train.update.update`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree
from train.batch import Batches, Entries, microbatches
from train.loss import caller, computed_in
from train.optim.base import Optimizer, check_optimizer, clip_factor, global_norm, trainable_mask, with_paths
from train.parallel.eval_steps import make_eval_over, make_forward_over
from train.parallel.mesh import Mesh, Parallelism, Strategy, in_dtype
from train.parallel.step import make_step_over

from .gradients import LossFn, Metrics, checked_loss, gradient_sums, metrics_of, totals, valid_count
from .remat_budget import budget_of
from .state import State
from .update import Plans, StepFunction, StepOptions, is_finite, rates_of, update, updated


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
    dtype: torch.dtype | None = None,
    mesh: Mesh | None = None,
    strategy: Strategy | None = None,
) -> StepFunction:
    """A function step(state, batch) -> (state, metrics).

    loss_fn(params, batch) -> (sum, count) or (sum, count, aux), aux a tree of sums. Any function that runs the model by
        fnmodels.hidden or forward with the params that it receives, which carry the step's options (remat, compilation,
        layouts, a mesh), see `train.loss`. Options that the loss sets itself are kept or wrapped. count
        and aux are added up and returned in int64, or in fp64 where they are floating.
    batch: a dict of [B, S], or of [1, T] with packed documents; or a list of such dicts with any lengths: microbatches
        of one step.
    accumulate: the number of microbatches into which the batch's rows are split, as evenly as possible; gradients are
        summed in fp32 at least and divided once by the number of valid tokens of the global batch, so every split gives
        the same step. Memory is that of the largest microbatch plus one copy of the gradients.
    clip: the largest global norm of the gradient; None: no clipping.
    remat: "none"; "full": a layer keeps only its input; "every:N": so does every Nth layer of each kind; "selective":
        layers keep the results of matmuls and attention and recompute the rest; "budget:2GiB": each layer is run in
        one of these ways, the fastest plan whose activations fit in 2 GiB per microbatch, from measured times and
        sizes (`train.remat_budget`; one process, compile "none" or "block").
    compile: "none"; "block": one compilation per kind of layer; "whole": the loss as one graph. Compiled code gets a
        layout only for rows of one document from position 0, since others would recompile for each batch; compiled
        blocks on CUDA get any, as tensors.
    inplace: the input State is consumed and its tensors are overwritten (see `State`). False leaves it unchanged,
        at the cost of a copy of parameters and optimizer state.
    balance_rate: after each update every layer's `selection_bias` is raised by this for experts with fewer tokens than
        the mean over the batch and lowered for those with more (`update_bias`). The loss's aux must hold counts
        [sparse layers, E], as that of `next_token_loss` does. None: biases are unchanged.
    dtype: in which the model computes, such as torch.bfloat16 with parameters in fp32: the loss receives the trainable
        parameters in this dtype, and gradients, moments and updates have that of the parameters. Frozen parameters keep
        their own. Over a mesh it is the `Strategy.gather_dtype`. None: the parameters' own.
    mesh: run on many ranks, see `train.parallel.step`: the State's leaves are DTensors; every rank passes the full
        batch and gets the global metrics. strategy: how ranks share the work, see `train.parallel.mesh.Strategy`.

    metrics, 0-d tensors: loss (mean over valid tokens, before the update), count, grad_norm (before clipping), lr,
    finite; aux (summed) if the loss returns one; and lr_of, the rate of each group of `partition`. Where the loss or
    the norm is not finite, parameters and optimizer state stay bitwise unchanged, `finite` is False, and state.step
    still advances. A microbatch without valid tokens adds nothing; a batch without any has loss 0 and gradient 0.
    Otherwise a ValueError names the trainable parameters that no microbatch's loss depends on, which would only decay;
    over a mesh steps are checked up to the first that reaches them all, see `train.parallel.reached`. With an optimizer
    that has `bind`, only the computation of a layout waits for the device.
    """
    options = StepOptions(accumulate, clip, remat, compile, inplace, balance_rate, dtype)
    check_optimizer(optimizer)
    check_strategy(mesh, strategy)
    if budget_of(remat) is not None and (mesh is not None or compile == "whole"):
        what = "a whole graph" if mesh is None else "a mesh"
        raise ValueError(
            f"remat={remat!r} plans from times measured in this process, and {what} needs one plan for all: take "
            '"full", "selective" or "every:N".'
        )
    if mesh is not None:
        how = in_dtype(strategy or Strategy(), dtype)
        return make_step_over(Parallelism(mesh, how), loss_fn, optimizer, options)
    loss = loss_fn if dtype is None else computed_in(dtype, loss_fn)
    sums_of = gradient_sums(loss, optimizer, remat=remat, compile=compile, counts=balance_rate is not None)
    plans = Plans(optimizer)

    def step(state: State, batch: Batches) -> tuple[State, Metrics]:
        plan = plans.of(state)
        sums = sums_of(state.params, microbatches(batch, accumulate), trains=plan.trains)
        after, metrics = update(
            optimizer, state, sums, plan=plan, clip=clip, inplace=inplace, balance_rate=balance_rate
        )
        plans.keep(after, plan)
        return after, metrics

    return step


def pure_step(
    loss_fn: LossFn, optimizer: Optimizer, *, clip: float | Tensor | None = None
) -> Callable[[State, Entries], tuple[State, Metrics]]:
    """A function step(state, batch) -> (state, metrics) without side effects, for the transforms of torch.func.

    It computes what `make_step(..., inplace=False)` does, in operations that go through vmap (over seeds, rates or
    batches), grad (through one step or many: MAML, hypergradients), jvp and torch.compile:

        def tuned(rate, state):
            return train.pure_step(loss_fn, train.adamw(rate))(state, batch)[1]["loss"]
        losses = torch.func.vmap(tuned, (0, None))(rates, state)

    Args:
        loss_fn: as in `make_step`. Second derivatives and jvp need a loss whose operations have them, such as
            train.next_token_loss with kernel="math".
        optimizer: its `update` is used. Hyperparameters may be tensors, of a transform too.
        clip: the largest global norm of the gradient, a number or a 0-d tensor; None: no clipping.

    Returns:
        The function. The State is neither consumed nor checked against the optimizer, and the batch is one dict.
        metrics: as of `make_step`. A parameter that the loss does not depend on has a gradient of 0 here.
    """
    check_optimizer(optimizer)
    StepOptions(clip=clip)

    def step(state: State, batch: Entries) -> tuple[State, Metrics]:
        flat = tree.flatten(state.params)
        trains = tree.flatten(trainable_mask(state.params, optimizer.traits.trainable))

        def mean(trained: dict[str, Tensor]) -> tuple[Tensor, Any]:
            params = with_paths(lambda path, leaf: trained.get(path, leaf), state.params)
            total, count, *aux = checked_loss(loss_fn(params, batch))
            return total / valid_count(total, count), (count, *aux)

        differentiated = torch.func.grad_and_value(mean, has_aux=True)
        grads, (loss, (count, *aux)) = differentiated({path: leaf for path, leaf in flat.items() if trains[path]})
        norm = global_norm(list(grads.values()))
        finite = is_finite(loss, norm)
        if clip is not None:
            factor = clip_factor(norm, clip)
            grads = {path: grad * factor.to(grad.dtype) for path, grad in grads.items()}
        metrics = {"loss": loss, "count": count, "grad_norm": norm, "finite": finite}
        metrics |= rates_of(optimizer, state.opt_state) | ({"aux": aux[0]} if aux else {})
        return updated(optimizer, state, [grads.get(path) for path in flat], ~finite), metrics

    return step


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

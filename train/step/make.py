"""`make_step`: a train step in one process or over a mesh."""

import torch

from train.batch import Batches, microbatches
from train.gradients import LossFn, Metrics, gradient_sums
from train.loss import computed_in
from train.optim.base import Optimizer, check_optimizer
from train.parallel.mesh import Mesh, Parallelism, Strategy, in_dtype
from train.parallel.step import make_step_over
from train.remat_budget import budget_of
from train.state import State
from train.update import Plans, StepOptions, refuse_transforms, update

from .evaluation import check_strategy
from .graph import GraphStep
from .many import Step


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
) -> Step:
    """Makes a train step: step(state, batch) -> (state, metrics), and step.many(state, batches) for k steps in one
    call.

    A batch is a dict of [B, S], or of [1, T] with packed documents, or a list of such dicts of any lengths, which are
    the microbatches of one step.

    Args:
        loss_fn: (params, batch) -> (sum, count) or (sum, count, aux), aux a tree of sums. It runs the model by
            fnmodels.hidden or forward with the params that it receives, which carry the step's options (remat,
            compilation, layouts, a mesh), see `train.loss`. Options that the loss sets itself are kept or wrapped. Sums
            are added up in fp64 if floating, else in int64.
        optimizer: A `train.Optimizer`, such as `train.adamw(3e-4)`.
        accumulate: The number of microbatches into which the batch's rows are split, as evenly as possible. Gradients
            are summed in fp32 at least and divided once by the number of valid tokens of the global batch, so every
            split gives the same step. Memory is that of the largest microbatch plus one copy of the gradients.
        clip: The largest global norm of the gradient; None: no clipping.
        remat: "none"; "full": a layer keeps only its input; "every:N": so does every Nth layer of each kind;
            "selective": layers keep the results of matmuls and attention and recompute the rest; "budget:2GiB": the
            fastest plan of these ways per layer whose activations fit in 2 GiB per microbatch, from measured times and
            sizes (`train.remat_budget`; one process, compile "none" or "block").
        compile: "none"; "block": one compilation per kind of layer; "whole": the loss as one graph; "step": loss,
            gradient, clipping and update as one graph, for small models, where Python takes longer than the arithmetic.
            A "step" has no mesh and no remat, each size of a batch is compiled by itself, and schedules must compute
            with tensors. On CUDA a step in place replays one CUDA graph, which is captured for each State and size of a
            batch, and refuses tensors on the host. Torch keeps the code on disk, so that a later process compiles in
            seconds. Compiled code gets a layout only for rows of one document from position 0, since others would
            recompile for each batch; compiled blocks on CUDA get any, as tensors.
        inplace: Whether the input State is consumed and its tensors are overwritten (see `State`). False leaves it
            unchanged, at the cost of a copy of parameters and optimizer state.
        balance_rate: After each update every layer's `selection_bias` is raised by this for experts with fewer tokens
            than the mean over the batch and lowered for those with more (`update_bias`). The loss's aux must hold
            counts [sparse layers, E], as that of `next_token_loss` does. None: biases are unchanged.
        dtype: The dtype of the model's computation, such as torch.bfloat16 with parameters in fp32. The loss receives
            the trainable parameters in this dtype; gradients, moments and updates have that of the parameters, and
            frozen parameters are not cast. Over a mesh it is the `Strategy.gather_dtype`. None: that of the parameters.
        mesh: The sizes of a mesh of ranks, see `train.parallel.step`: the State's leaves are DTensors, every rank
            passes the full batch and gets the global metrics. None: one process.
        strategy: How the ranks share the work, see `train.parallel.Strategy`; None: its defaults.

    Returns:
        The step. Its metrics are 0-d tensors: loss (mean over valid tokens, before the update), count, grad_norm
        (before clipping), lr, finite; aux (summed) if the loss returns one; and lr_of, the rate of each group of
        `partition`.
        Where the loss or the norm is not finite, parameters and optimizer state stay bitwise unchanged, `finite` is
        False, and state.step still advances. A microbatch without valid tokens adds nothing; a batch without any has
        loss 0 and gradient 0. With an optimizer that has `bind`, only the computation of a layout waits for the device.

    Raises:
        ValueError: An option is unknown or does not fit the others, such as a strategy without a mesh. The step raises
            it for trainable parameters that no microbatch's loss depends on, which would only decay; over a mesh steps
            are checked up to the first that reaches them all, see `train.parallel.reached`.
        TypeError: The optimizer is no `train.Optimizer`.
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
        return Step(make_step_over(Parallelism(mesh, how), loss_fn, optimizer, options))
    loss = loss_fn if dtype is None else computed_in(dtype, loss_fn)
    if compile == "step":
        graphs = GraphStep(loss, optimizer, options)
        return Step(graphs, graphs.planned)
    sums_of = gradient_sums(loss, optimizer, remat=remat, compile=compile, counts=balance_rate is not None)
    plans = Plans(optimizer)

    def step(state: State, batch: Batches) -> tuple[State, Metrics]:
        refuse_transforms()
        plan = plans.of(state)
        sums = sums_of(state.params, microbatches(batch, accumulate), leaves=plan.leaves)
        after, metrics = update(
            optimizer, state, sums, plan=plan, clip=clip, inplace=inplace, balance_rate=balance_rate
        )
        plans.keep(after, plan)
        return after, metrics

    return Step(step)

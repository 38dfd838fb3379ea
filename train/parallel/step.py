"""The train step over a mesh: gradients of all ranks' tokens are summed, and each rank updates its shards.

    mesh = Mesh(fsdp=4)
    placements = params.plan(spec, rules_of(mesh, config), mesh.device_mesh())
    state = init_state(params.init(config, 0, plan=placements), optimizer)
    step = make_step(functools.partial(next_token_loss, config=config), optimizer, clip=1.0, mesh=mesh)
    state, metrics = step(state, batch)                       # on all ranks, with the same batch

Every rank takes its rows of the batch and computes sums over its tokens; total, count and gradients are summed over
ranks and divided once, by the number of valid tokens of the global batch. Whatever could differ between ranks is
checked before any communication: a rank that raised alone would leave the others waiting.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fnmodels.tree import Tree
from train.batch import Batches, Entries, microbatches
from train.comm.dtensor import local_tree
from train.comm.failures import naming_the_lost
from train.gradients import LossFn, Metrics, Sums, checked_loss, gradient_sums
from train.loss import as_loss
from train.losses.batch_checks import check_of
from train.losses.output_loss import needs_full_rows
from train.optim.base import Optimizer
from train.parallel.pipeline import gradients
from train.parallel.pipeline.microbatch import recorded, stop_before
from train.parallel.pipeline.schedule import SPLITTING
from train.parallel.pipeline.stages import stages_of
from train.state import State
from train.update import StepFunction, StepOptions, check_state

from .agreement import everyone
from .batch_shards import own_parts
from .compose import compose
from .mesh import Parallelism, mesh_of, whole_groups
from .placement import Placed, place
from .reached import Reached, with_unreached
from .update import ShardedUpdate, sharded_update, update_over


def make_step_over(
    parallelism: Parallelism, loss_fn: LossFn, optimizer: Optimizer, options: StepOptions
) -> StepFunction:
    """`train.make_step` over a mesh; the State's parameters and moments are DTensors on `mesh.device_mesh()`.

    With `pp` the State holds this rank's layers (`stages`), and `accumulate` is the number of microbatches. ValueError
    for batches that the mesh cannot shard, and for optimizers that need more than shards.
    """
    check_compile(parallelism, options.compile, options.remat)
    known: list[tuple[ShardedUpdate, Callable[..., Sums]]] = []

    def step(state: State, batch: Batches) -> tuple[State, Metrics]:
        if not known or not known[0][0].placed.is_of(state.params):
            # once: a step keeps the placement of its State
            check_state(optimizer, local_tree(state))
            placed = placed_for(loss_fn, parallelism, state.params, batch, optimizer.traits.trainable)
            known[:] = [(sharded_update(placed, optimizer), sums_over(placed, loss_fn, optimizer, options))]
        updates, sums_of = known[0]
        local = local_tree(state.params)
        with naming_the_lost(updates.placed.ranks, lambda: f"step {int(state.step) + 1}"):
            parts = parts_for(loss_fn, local, batch, updates.placed, options.accumulate)
            return update_over(updates, state, sums_of(local, parts, divide=False), options)

    return step


def check_compile(parallelism: Parallelism, compile: str, remat: str = "none") -> None:
    """ValueError for a `compile` that is unknown or cannot run over this mesh."""
    if compile not in ("none", "block"):
        raise ValueError(
            f'compile is {compile!r}; over a mesh it must be "none" or "block": what gathers layers goes into no graph.'
        )
    why = not_compiled(parallelism)
    if compile == "block" and why is not None:
        raise ValueError(f'compile is "block", but {why}; there it must be "none".')
    if compile == "block" and remat == "selective":
        raise ValueError(
            'remat="selective" chooses among single operations, and over a mesh it is outside of compiled blocks, '
            'which hide them: take "full" or "every:N".'
        )


def not_compiled(parallelism: Parallelism) -> str | None:
    """Why layers cannot be compiled over this mesh, as a clause of an error message; None if they can."""
    mesh, strategy = parallelism.mesh, parallelism.strategy
    if mesh.ep > 1:
        return "over ep it is the host that reads how many tokens each expert has"
    if mesh.cp > 1 and strategy.context == "ring":
        return 'context="ring" asks the host which keys no query sees'
    if mesh.pp > 1 and strategy.schedule in SPLITTING:
        return f"schedule={strategy.schedule!r} takes each layer's backward pass in two, and that of a graph is one"
    return None


def placed_for(
    function: Callable[..., Any], parallelism: Parallelism, params: Tree, batch: Any, trainable: Any
) -> Placed:
    """The `Placed` of params, with the config of a function of (params, batch). trainable: the optimizer's."""
    placed = place(parallelism.mesh, params, None, parallelism.strategy, trainable)
    return replace(placed, config=config_of(function, placed, local_tree(params), batch))


def config_of(function: Callable[..., Any], placed: Placed, local: Tree, batch: Batches) -> Any:
    """The config with which a function of (params, batch) runs the model, the same on all ranks.

    It is the keyword of a functools.partial; for another function, the one with which it calls fnmodels, found by
    running it up to that call. None if it makes no such call. ValueError, on all ranks alike, if the mesh needs the
    config then.
    """
    if isinstance(function, functools.partial) and "config" in function.keywords:
        return function.keywords["config"]
    config, fault = None, "it runs no model by fnmodels.hidden or forward"
    try:
        found = recorded(function, local, microbatches(batch)[0])
        config = None if found is None else found.config
    except Exception as error:  # raising here alone would leave the other ranks waiting
        fault = f"{type(error).__name__}: {error}"
    of_all = everyone((config, fault), whole_groups(placed.devices))
    config, mesh = next((config for config, _ in of_all if config is not None), None), mesh_of(placed.devices)
    if config is None and mesh.tp * mesh.cp * mesh.pp > 1:
        raise ValueError(
            f"The mesh {mesh} divides what is inside of the model, so the loss function must hold its config, "
            f"functools.partial(loss_fn, config=config), or run the model by fnmodels: {of_all[0][1]}."
        )
    return config


def parts_for(
    function: Callable[..., Any], local: Tree, batch: Batches, placed: Placed, accumulate: int = 1
) -> list[Entries]:
    """`own_parts` with what the function needs."""
    rows = placed.devices["cp"].size() > 1 and needs_full_rows(function)
    return own_parts(batch, placed, accumulate, check=batch_check(function, local, placed), places=rows, rows=rows)


def batch_check(function: Callable[..., Any], local: Tree, placed: Placed) -> Callable[[Entries], None]:
    """A check that raises for rows that the function cannot use, before anything is sent.

    Over pp, whose stages would wait, it also runs the function up to its call of the model, or to what it gathers.
    """
    values, mesh = check_of(function), mesh_of(placed.devices)
    alone = mesh.rows > 1 or placed.strategy.rows == "own"  # otherwise all stages refuse what `microbatches` does
    staged = as_loss(function).with_options(ranks={"all_documents": stop_before}) if mesh.pp > 1 and alone else None

    def check(part: Entries) -> None:
        if placed.config is not None:
            values(part, placed.config)
        if staged is not None:
            recorded(staged, local, part)

    return check


def sums_over(placed: Placed, loss_fn: LossFn, optimizer: Optimizer, options: StepOptions) -> Callable[..., Sums]:
    """`train.gradients.gradient_sums` of this rank: takes `local_tree(params)` and lists of its microbatches."""
    reached, counts = Reached(), options.balance_rate is not None
    composed = compose(placed, remat=options.remat, compile=options.compile, counts=counts, watch=reached.watch)
    loss = composed.loss(loss_fn)
    if placed.devices["pp"].size() > 1:
        run = gradients.gradient_sums(loss, optimizer, *stages_of(placed, composed))
    else:
        run = gradient_sums(_with_a_graph(loss), optimizer)
    return with_unreached(run, reached, placed)


def _with_a_graph(function: Callable[..., Any]) -> LossFn:
    """Raises ValueError for a constant sum, even if no token counts: other ranks wait for this rank's gradients."""

    def run(params: Tree, batch: Entries) -> tuple[Any, ...]:
        found = function(params, batch)
        total, *_ = checked_loss(found)
        if not total.requires_grad:
            raise ValueError(
                "The loss does not depend on any trainable parameter; over a mesh it must do so in every process, of "
                "rows without a token too: a sum of nothing, rather than a constant."
            )
        return tuple(found)

    return run

"""The train step over a mesh: the same sums, taken by many processes.

    mesh = Mesh(fsdp=4)
    placements = params.plan(spec, rules_of(mesh, config), mesh.device_mesh())
    state = init_state(params.init(config, 0, plan=placements), optimizer)
    step = make_step(functools.partial(next_token_loss, config=config), optimizer, clip=1.0, mesh=mesh)
    state, metrics = step(state, batch)                       # by all processes, with the same batch

Every process takes its rows of the batch. What it gets is a sum over its tokens; total, count and gradients are summed
over processes and divided once, by the number of valid tokens of the whole batch. Each updates the parts that it
holds. What could differ between processes is checked before anything is sent: one that raised alone would leave the
others waiting.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fnmodels.tree import Tree
from train.dist.dtensor import local_tree
from train.gradients import LossFn, Sums, checked_loss, gradient_sums
from train.loss_call import Batch, compiling, open_keywords
from train.losses.moe_balance import Balance
from train.optim.base import Optimizer
from train.parallel.context.api import asks_length, context_kernel, longest, whole_balance
from train.parallel.pipeline.schedule import SPLITTING
from train.parallel.pipeline.staged_loss import staged
from train.parallel.pipeline.stages import stage_sums
from train.parallel.pipeline.types import Staged
from train.parallel.tensor.api import tensor_parallel
from train.state import State
from train.update import Step, check_state

from .batch_shards import own_parts
from .expert import expert_parallel
from .fsdp import gathering
from .mesh import Mesh, Strategy, mesh_of
from .placement import Placed, place
from .update import Teaching, teach, update_over


def make_step_over(
    mesh: Mesh,
    loss_fn: LossFn,
    optimizer: Optimizer,
    *,
    accumulate: int,
    clip: float | None,
    remat: str,
    compile: str,
    inplace: bool,
    balance_rate: float | None,
    strategy: Strategy,
) -> Step:
    """`train.make_step` over a mesh; the State's parameters and moments are DTensors on `mesh.device_mesh()`.

    With `tp`, `cp` or `pp` the loss function must be a functools.partial that holds the model's config; with `pp` the
    State is of this process' layers (`stages`), and `accumulate` is the number of microbatches. Batches that the mesh
    does not divide are refused, and so are optimizers that need more than parts.
    """
    config = config_for(mesh, loss_fn, compile, strategy, remat)
    check = staged(loss_fn).check if mesh.pp > 1 else None
    known: list[tuple[Teaching, Callable[..., Sums]]] = []
    how: dict[str, Any] = {"remat": remat, "compile": compile, "counts": balance_rate is not None}

    def step(state: State, batch: Batch | Sequence[Batch]) -> tuple[State, dict[str, Any]]:
        if not known or not known[0][0].placed.is_of(state.params):
            # once: what a step returns lies as what it was given
            check_state(optimizer, local_tree(state))
            teaching = teach(place(mesh, state.params, config, strategy, optimizer.trainable), optimizer)
            known[:] = [(teaching, sums_over(teaching.placed, loss_fn, optimizer, **how))]
        teaching, sums_of = known[0]
        parts = own_parts(batch, teaching.placed, accumulate, check=check)
        sums = sums_of(local_tree(state.params), parts, divide=False)
        return update_over(teaching, state, sums, clip=clip, inplace=inplace, balance_rate=balance_rate)

    return step


def not_compiled(mesh: Mesh, strategy: Strategy) -> str | None:
    """Why layers so shared do not go into graphs, as a part of a sentence; None where they do."""
    if mesh.ep > 1:
        return "over ep it is the host that reads how many tokens each expert has"
    if mesh.cp > 1 and strategy.context == "ring":
        return 'context="ring" asks the host which keys nobody looks at'
    if mesh.pp > 1 and strategy.schedule in SPLITTING:
        return f"schedule={strategy.schedule!r} takes each layer's backward pass in two, and that of a graph is one"
    return None


def config_for(mesh: Mesh, function: Callable[..., Any], compile: str, strategy: Strategy, remat: str = "none") -> Any:
    """`config_in` a loss function, or another of (params, batch). ValueError for one that cannot run over this mesh."""
    if compile not in ("none", "block"):
        raise ValueError(
            f'compile is {compile!r}; over a mesh it must be "none" or "block": what gathers layers goes into no graph.'
        )
    why = not_compiled(mesh, strategy)
    if compile == "block" and why is not None:
        raise ValueError(f'compile is "block", but {why}; there it must be "none".')
    if compile == "block" and remat == "selective":
        raise ValueError(
            'remat="selective" chooses among single operations, and over a mesh it is outside of compiled blocks, '
            'which hide them: take "full" or "every:N".'
        )
    if isinstance(function, Staged):
        if mesh.pp == 1:
            raise ValueError(
                f"A Staged is for stages, and the mesh {mesh} has none: give the function of (params, batch) itself."
            )
        return function.config
    if "layer_fn" not in open_keywords(function):
        raise ValueError(
            f"Over the mesh {mesh} layers are gathered where they run, so the loss function needs a free keyword "
            "`layer_fn`, which it hands to fnmodels.forward or fnmodels.hidden."
        )
    config = config_in(function)
    if config is None and mesh.tp * mesh.cp * mesh.pp > 1:
        raise ValueError(
            f"The mesh {mesh} divides what is inside of the model, so the loss function must hold its config: "
            "functools.partial(loss_fn, config=config)."
        )
    return config


def config_in(function: Callable[..., Any] | Staged) -> Any:
    """The config that a function of (params, batch) holds, or None."""
    if isinstance(function, Staged):
        return function.config
    found = inspect.signature(function).parameters.get("config")
    return None if found is None or found.default is found.empty else found.default


def sums_over(
    placed: Placed, loss_fn: LossFn, optimizer: Optimizer, *, remat: str, compile: str, counts: bool
) -> Callable[..., Sums]:
    """`train.gradients.gradient_sums` of this process: of `local_tree(params)` and lists of its parts of batches."""
    if placed.devices["pp"].size() > 1:
        return stage_sums(loss_fn, optimizer, placed, remat=remat, compile=compile, counts=counts)
    return gradient_sums(_with_a_graph(placed_loss(loss_fn, placed, compile)), optimizer, remat=remat, counts=counts)


def placed_loss(loss_fn: LossFn, placed: Placed, compile: str) -> LossFn:
    """loss_fn(params, batch, ...) as one of the parts of both that a process has: `local_tree(params)`, `own_part`.

    Each way of sharing wraps the function whole, from the inside out: attention, experts, parts of layers, compilation
    of these, gathering.
    """
    devices, strategy = placed.devices, placed.strategy
    mesh = mesh_of(devices)
    bound = {name: keyword.default for name, keyword in inspect.signature(loss_fn).parameters.items()}
    if any(asks_length(bound.get("length", 0), bound.get(name)) for name in ("config", "teacher_config")):
        loss_fn = _with_length(loss_fn, longest(devices))
    if isinstance(bound.get("balance"), Balance):
        loss_fn = _with(loss_fn, balance=whole_balance(bound["balance"], devices))
    if mesh.cp > 1:
        group = devices.get_group("cp")
        loss_fn = _with(loss_fn, kernel=context_kernel(strategy.context, group, inner=_named(loss_fn, "kernel", mesh)))
    if mesh.ep > 1:
        inner = _named(loss_fn, "experts", mesh)
        loss_fn = _with(loss_fn, experts=expert_parallel(devices.get_group("ep"), inner=inner))
    if mesh.tp > 1:
        loss_fn = tensor_parallel(placed.config, placed.shards, sequence=strategy.sequence).run(loss_fn)
    return gathering(compiling(loss_fn, compile), placed.shards, dtype=strategy.gather_dtype, trains=placed.trains)


def _with_a_graph(loss_fn: LossFn) -> LossFn:
    """ValueError for a sum that is a constant, even where nothing counts: others wait for this process' gradients."""

    @functools.wraps(loss_fn)
    def run(params: Tree, batch: Batch, **more: Any) -> Any:
        total, *rest = checked_loss(loss_fn(params, batch, **more))
        if not total.requires_grad:
            raise ValueError(
                "The loss does not depend on any leaf that trains; over a mesh it must do so in every process, of rows "
                "without a token too: a sum of nothing, rather than a constant."
            )
        return total, *rest

    return run


def _with(loss_fn: LossFn, **chosen: Any) -> LossFn:
    @functools.wraps(loss_fn)
    def run(params: Tree, batch: Batch, **more: Any) -> Any:
        return loss_fn(params, batch, **more | chosen)

    return run


def _with_length(loss_fn: LossFn, length: Callable[[Tensor], Tensor]) -> LossFn:
    @functools.wraps(loss_fn)
    def run(params: Tree, batch: Batch, **more: Any) -> Any:
        return loss_fn(params, batch, **more | {"length": length(batch["positions"])})

    return run


def _named(loss_fn: LossFn, name: str, mesh: Mesh) -> str:
    """What the loss function has for this keyword: the name of how one process does it."""
    found = inspect.signature(loss_fn).parameters.get(name)
    if found is None or not isinstance(found.default, str):
        raise ValueError(
            f"Over the mesh {mesh} `{name}` is the step's to set, so the loss function needs that keyword, and as its "
            "value the name of how one process does it."
        )
    default: str = found.default
    return default

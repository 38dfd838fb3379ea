"""Over a mesh, what learns nothing: losses, and functions of each token, whole in every process.

    evaluate = train.make_eval_step(loss_fn, mesh=mesh)
    run = train.make_forward_only(functools.partial(token_logprobs, config=config), mesh=mesh)
    logp, entropy, valid = run(state.params, batch)           # [B, S] of the whole batch

Each process is given the whole batch, takes its part as in a step, and what comes of it is joined. With
`Strategy(rows="own")` it is given its rows, and gets what comes of these.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fnmodels import family_of, tree
from fnmodels.tree import Tree
from train.dist.collectives import all_gather
from train.dist.dtensor import local_tree
from train.gradients import LossFn, metrics_of, totals
from train.loss_call import Batch, caller
from train.optim.base import with_paths
from train.parallel.pipeline.staged_loss import staged, staged_outputs
from train.parallel.pipeline.stages import stage_loss, stage_outputs

from .batch_shards import own_parts
from .mesh import ROWS, Mesh, Strategy
from .padding import PLACES, unpadded
from .placement import Placed, place
from .step import config_for, config_in, placed_loss
from .update import over_processes
from .whole_model import aux_of_stages

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


def make_eval_over(
    mesh: Mesh, loss_fn: LossFn, *, compile: str, strategy: Strategy
) -> Callable[[Tree, Batch | Sequence[Batch]], dict[str, Any]]:
    """`train.make_eval_step` over a mesh."""
    config = config_for(mesh, loss_fn, compile, strategy)

    def make(placed: Placed) -> Callable[[Tree, Sequence[Batch]], tuple[Any, ...]]:
        if mesh.pp == 1:
            return functools.partial(totals, caller(placed_loss(loss_fn, placed, compile)))
        run, whole_aux = stage_loss(loss_fn, placed, compile), aux_of_stages(placed)

        def sums(params: Tree, parts: Sequence[Batch]) -> tuple[Any, ...]:
            total, count, aux = run(params, parts)
            return (total, count) if aux is None else (total, count, whole_aux(aux))

        return sums

    made = _once(mesh, loss_fn, config, strategy, make)
    check = staged(loss_fn).check if mesh.pp > 1 else None

    @torch.no_grad()
    def eval_step(params: Tree, batch: Batch | Sequence[Batch]) -> dict[str, Any]:
        placed, run = made(params)
        parts = own_parts(batch, placed, check=check)
        return metrics_of(*over_processes(placed.devices, *run(local_tree(params), parts)))

    return eval_step


def make_forward_over(
    mesh: Mesh, function: Callable[..., Any], *, compile: str, strategy: Strategy
) -> Callable[[Tree, Batch | Sequence[Batch]], Any]:
    """`train.make_forward_only` over a mesh, of functions whose tensors are [B, ...], over cp [B, S, ...].

    Where rows were padded, what is as long as these then are is cut: that is no size of the model (`clear_length`).
    """
    config = config_for(mesh, function, compile, strategy)

    def make(placed: Placed) -> Callable[[Tree, Sequence[Batch]], list[Any]]:
        if mesh.pp > 1:
            return stage_outputs(function, placed, compile)
        call = caller(placed_loss(function, placed, compile))
        return lambda params, parts: [call(params, part) for part in parts]

    made = _once(mesh, function, config, strategy, make)
    check = staged_outputs(function).check if mesh.pp > 1 else None

    @torch.no_grad()
    def run(params: Tree, batch: Batch | Sequence[Batch]) -> Any:
        placed, call = made(params)
        many = isinstance(batch, (list, tuple))
        given: Sequence[Batch] = batch if many else [batch]  # type: ignore[list-item,assignment]  # as in `microbatches`
        parts = [dict(part) for part in own_parts(given, placed, check=check, places=mesh.cp > 1)]
        places = [part.pop(PLACES, None) for part in parts]
        found = call(local_tree(params), parts)
        divided = [name for name in ROWS if placed.devices[name].size() > 1 and strategy.rows == "whole"]
        joined = []
        for one, part, at, whole in zip(found, parts, places, given, strict=True):
            rows, columns = part["tokens"].shape[:2]
            join = functools.partial(_joined, rows=rows, places=at, divided=divided, devices=placed.devices)
            size = tuple(whole["tokens"].shape[:2])
            cut = functools.partial(unpadded, larger=(size[0], columns * mesh.cp), size=size)
            joined.append(tree.map(cut, tree.map(join, one)))
        return joined if many else joined[0]

    return run


def _once(
    mesh: Mesh, function: Callable[..., Any], config: Any, strategy: Strategy, make: Callable[[Placed], T]
) -> Callable[[Tree], tuple[Placed, T]]:
    """made(params) -> (where they lie, what `make` makes of it), made anew for params that lie elsewhere."""
    known: list[tuple[Placed, T]] = []

    def made(params: Tree) -> tuple[Placed, T]:
        if not known or not known[0][0].is_of(params):
            placed = place(mesh, params, config, strategy, _learning(function))
            known[:] = [(placed, make(placed))]
        return known[0]

    return made


def _learning(function: Callable[..., Any]) -> Callable[[Tree], Tree]:
    """Which leaves training would send in another dtype: those that learn, as far as the config tells."""
    config = config_in(function)
    spec = {} if config is None else tree.flatten(family_of(config).spec(config))
    fixed = {path for path, leaf in spec.items() if not leaf.trainable}
    return lambda params: with_paths(lambda path, _: path not in fixed, params)


def _joined(x: Tensor, rows: int, places: Tensor | None, divided: Sequence[str], devices: DeviceMesh) -> Tensor:
    """What the processes that divide rows have of a tensor, with its columns where they were."""
    wanted = [rows] if places is None else [*places.shape]
    if (divided or places is not None) and list(x.shape[: len(wanted)]) != wanted:
        what = "[B, S, ...]" if places is not None else "[B, ...]"
        raise ValueError(
            f"Over a mesh that divides batches a function must return tensors {what}, here of {wanted}, and one is "
            f"{list(x.shape)}; losses are for make_eval_step."
        )
    if places is not None:
        group = devices.get_group("cp")
        order = all_gather(places, 1, group).argsort(1)
        x = all_gather(x, 1, group)
        x = x[torch.arange(len(x), device=x.device)[:, None], order]
    for name in reversed(divided):  # the last one divided what the others left
        x = all_gather(x, 0, devices.get_group(name))
    return x

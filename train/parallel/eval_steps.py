"""Evaluation and per-token functions over a mesh, without gradients; every rank gets the same results.

    evaluate = train.make_eval_step(loss_fn, mesh=mesh)
    run = train.make_forward_only(functools.partial(token_logprobs, config=config), mesh=mesh)
    logp, entropy, valid = run(state.params, batch)           # [B, S] of the global batch

Each rank is given the global batch, computes its shard as in a step, and the results are all-gathered. With
`Strategy(rows="own")` it is given its own rows and gets the results of these.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fnmodels import family_of, tree
from fnmodels.tree import Tree
from train.batch import PLACES, Batches, Entries
from train.comm.collectives import all_gather
from train.comm.dtensor import local_tree
from train.gradients import LossFn, Metrics, metrics_of, totals
from train.optim.base import trainable_mask, with_paths
from train.parallel.pipeline.gradients import loss_sums, outputs
from train.parallel.pipeline.stages import stages_of

from .batch_shards import own_parts
from .compose import compose
from .mesh import ROWS, Parallelism
from .padding import entry_of_tokens, unpadded
from .placement import Placed
from .step import batch_check, check_compile, parts_for, placed_for
from .update import over_processes
from .whole_model import aux_of_stages

T = TypeVar("T")


def make_eval_over(parallelism: Parallelism, loss_fn: LossFn, compile: str) -> Callable[[Tree, Batches], Metrics]:
    """`train.make_eval_step` over a mesh."""
    mesh = parallelism.mesh

    def make(placed: Placed) -> Callable[[Tree, Sequence[Entries]], tuple[Any, ...]]:
        composed = compose(placed, compile=compile)
        loss = composed.loss(loss_fn)
        if mesh.pp == 1:
            return functools.partial(totals, loss)
        run, whole_aux = loss_sums(loss, *stages_of(placed, composed)), aux_of_stages(placed)

        def sums(params: Tree, parts: Sequence[Entries]) -> tuple[Any, ...]:
            total, count, aux = run(params, parts)
            return (total, count) if aux is None else (total, count, whole_aux(aux))

        return sums

    made = _once(parallelism, loss_fn, compile, make)

    @torch.no_grad()
    def eval_step(params: Tree, batch: Batches) -> Metrics:
        placed, run = made(params, batch)
        local = local_tree(params)
        parts = parts_for(loss_fn, local, batch, placed)
        return metrics_of(*over_processes(placed.devices, *run(local, parts)))

    return eval_step


def make_forward_over(
    parallelism: Parallelism, function: Callable[..., Any], compile: str
) -> Callable[[Tree, Batches], Any]:
    """`train.make_forward_only` over a mesh; the function returns tensors [B, ...], over cp [B, S, ...].

    If rows were padded, tensors of the padded length are cut back: `clear_length` makes it differ from every model
    dimension.
    """
    mesh = parallelism.mesh

    def make(placed: Placed) -> Callable[[Tree, Sequence[Entries]], list[Any]]:
        composed = compose(placed, compile=compile)
        call = composed.loss(function)
        if mesh.pp > 1:
            return outputs(call, *stages_of(placed, composed))
        return lambda params, parts: [call(params, part) for part in parts]

    made = _once(parallelism, function, compile, make)

    @torch.no_grad()
    def run(params: Tree, batch: Batches) -> Any:
        placed, call = made(params, batch)
        many, local = isinstance(batch, (list, tuple)), local_tree(params)
        given: Sequence[Entries] = batch if many else [batch]  # type: ignore[list-item,assignment]  # as in `microbatches`
        checked = own_parts(given, placed, check=batch_check(function, local, placed), places=mesh.cp > 1)
        parts, places = without_places(checked)
        found = call(local, parts)
        joined = full_outputs(found, parts, places, given, placed)
        return joined if many else joined[0]

    return run


def without_places(parts: Sequence[Entries]) -> tuple[list[Entries], list[Tensor | None]]:
    """(the microbatches without PLACES, PLACES of each)."""
    own = [dict(part) for part in parts]
    return [*own], [part.pop(PLACES, None) for part in own]


def full_outputs(
    found: Sequence[Any],
    parts: Sequence[Entries],
    places: Sequence[Tensor | None],
    given: Sequence[Entries],
    placed: Placed,
) -> list[Any]:
    """The outputs [B, S, ...] of the microbatches `given`, from those of this rank's `parts` of them."""
    sharded = [name for name in ROWS if placed.devices[name].size() > 1 and placed.strategy.rows == "whole"]
    joined = []
    for one, part, at, whole in zip(found, parts, places, given, strict=True):
        rows, positions = entry_of_tokens(part).shape[:2]
        join = functools.partial(_joined, rows=rows, places=at, sharded=sharded, devices=placed.devices)
        size = tuple(entry_of_tokens(whole).shape[:2])
        cut = functools.partial(unpadded, larger=(size[0], positions * placed.devices["cp"].size()), size=size)
        joined.append(tree.map(cut, tree.map(join, one)))
    return joined


def _once(
    parallelism: Parallelism, function: Callable[..., Any], compile: str, make: Callable[[Placed], T]
) -> Callable[[Tree, Any], tuple[Placed, T]]:
    """made(params, batch) -> (their `Placed`, make(placed)), cached until the placement of the params changes."""
    check_compile(parallelism, compile)
    known: list[tuple[Placed, T]] = []

    def made(params: Tree, batch: Any) -> tuple[Placed, T]:
        if not known or not known[0][0].is_of(params):
            placed = placed_for(function, parallelism, params, batch, lambda values: tree.map(lambda _: True, values))
            trained = functools.partial(trained_in, placed.config)
            placed = replace(placed, trains=trainable_mask(local_tree(params), trained))
            known[:] = [(placed, make(placed))]
        return known[0]

    return made


def trained_in(config: Any, params: Tree) -> Tree:
    """A tree of bools: the parameters that training sends in `gather_dtype`, as far as the config is known."""
    spec = {} if config is None else tree.flatten(family_of(config).spec(config))
    fixed = {path for path, leaf in spec.items() if not leaf.trainable}
    return with_paths(lambda path, _: path not in fixed, params)


def _joined(x: Tensor, rows: int, places: Tensor | None, sharded: Sequence[str], devices: DeviceMesh) -> Tensor:
    """All-gathers a tensor over the ranks that shard rows and positions, and restores the order of positions.

    ValueError if its leading dimensions are not those of the batch shard.
    """
    wanted = [rows] if places is None else [*places.shape]
    if (sharded or places is not None) and list(x.shape[: len(wanted)]) != wanted:
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
    for name in reversed(sharded):  # the innermost mesh dimension shards last
        x = all_gather(x, 0, devices.get_group(name))
    return x

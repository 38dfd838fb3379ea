"""From the gradients and sums of all ranks to the next State: every rank updates its own shards.

Gradients arrive as complete sums, sharded (`fsdp`); totals, counts and aux are summed over ranks here. The global norm
counts a replicated parameter once, and an optimizer that needs full matrices all-gathers them.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fnmodels import tree
from fnmodels.ops.dtypes import widest
from fnmodels.tree import Tree
from params.sharding import Sharding
from train.comm.collectives import all_gather, summed
from train.comm.dtensor import local_tree, placed_like
from train.gradients import Metrics, Sums
from train.losses.moe_balance import moved_biases
from train.optim.base import OnFull, Optimizer, sharded_version, wide_dtype, with_paths
from train.parallel.pipeline.stages import counted_elsewhere
from train.parallel.pipeline.tree_split import entry_of
from train.state import State, consume
from train.update import StepOptions, update

from .fsdp import ParamShard, gather
from .mesh import DATA, whole_groups
from .placement import Placed
from .whole_model import aux_of_stages


@dataclass(frozen=True)
class ShardedUpdate:
    """The optimizer on shards, with the reductions over ranks that its update needs."""

    placed: Placed
    optimizer: Optimizer  # of shards
    norm_of: Callable[[list[Tensor]], Tensor]
    whole_aux: Callable[[Tree], Tree] | None  # from a stage's aux to that of all layers


def sharded_update(placed: Placed, optimizer: Optimizer) -> ShardedUpdate:
    """The `ShardedUpdate` of an optimizer. ValueError if it needs more than shards or full matrices."""
    on_shards = optimizer_of_shards(placed, optimizer)
    staged = placed.devices["pp"].size() > 1
    trained, elsewhere = tree.flatten(placed.trains), counted_elsewhere(placed) if staged else frozenset[str]()
    trainable = {path: how for path, how in tree.flatten(placed.shards).items() if trained[path]}
    once = [entry_of(path, elsewhere) is None for path in trainable]
    norm_of = norm_over(list(trainable.values()), placed.devices, once)
    return ShardedUpdate(placed, on_shards, norm_of, aux_of_stages(placed) if staged else None)


def optimizer_of_shards(placed: Placed, optimizer: Optimizer) -> Optimizer:
    """The optimizer for this rank's shards of this rank's layers. ValueError if it needs more than these."""
    if placed.devices["pp"].size() > 1 and not (optimizer.traits.elementwise or optimizer.traits.per_leaf):
        raise ValueError(
            "The optimizer needs the gradients of all layers (clip_norm in a chain does, and a custom train.Optimizer "
            "without OptimizerTraits(per_leaf=True)), and over pp each stage has its own layers alone: use the step's "
            "clip=, whose norm is global."
        )
    on_shards = sharded_version(optimizer, _on_matrices(placed.shards))
    if on_shards is None:
        check_whole(placed.shards)
    return on_shards or optimizer


def update_over(
    updates: ShardedUpdate,
    state: State,
    sums: Sums,
    options: StepOptions,
    divide_by: float | Tensor | None = None,
) -> tuple[State, Metrics]:
    """`train.update.update` from the sums of this rank; divide_by is the same on all ranks."""
    held, placed = local_tree(state), updates.placed
    everyone = _global(sums, placed.devices)
    after, metrics = update(
        updates.optimizer,
        held,
        everyone,
        divide_by=divide_by,
        clip=options.clip,
        inplace=options.inplace,
        balance_rate=options.balance_rate,
        norm_of=updates.norm_of,
        biases_of=functools.partial(_moved_parts, placed.shards),
    )
    if updates.whole_aux is not None and "aux" in metrics:
        metrics["aux"] = updates.whole_aux(metrics["aux"])
    result = tree.map(placed_like, after, state)
    if options.inplace:
        consume(state)
    return result, metrics


def norm_over(
    placed: Sequence[Sharding], devices: DeviceMesh, counted: Sequence[bool]
) -> Callable[[list[Tensor]], Tensor]:
    """`global_norm` of sharded gradients: each replicated parameter counts once.

    placed: the sharding of each gradient, on `devices`. counted: False for a parameter that another stage counts.
    """
    groups = whole_groups(devices)

    def norm_of(grads: list[Tensor]) -> Tensor:
        wide = wide_dtype(grads[0].dtype) if grads else torch.float32
        device = grads[0].device if grads else torch.get_default_device()
        square = torch.zeros((), dtype=widest(device), device=device)
        for grad, how, counts in zip(grads, placed, counted, strict=True):
            if counts and _is_first_copy(how):
                square += torch.linalg.vector_norm(grad, dtype=wide_dtype(grad.dtype)).to(square.dtype).square()
        return summed(square, *groups).sqrt().to(wide)

    return norm_of


def _is_first_copy(how: Sharding) -> bool:
    assert how.mesh is not None
    coordinate = how.mesh.get_coordinate()
    assert coordinate is not None
    places = zip(coordinate, how.dims, how.sizes, strict=True)
    return not any(at for at, dim, (name, _) in places if dim is None and name != "pp")


def _global(sums: Sums, devices: DeviceMesh) -> Sums:
    """The total, count and aux of all ranks; the gradients and `unreached` are complete already."""
    groups = [devices.get_group(name) for name in DATA if devices[name].size() > 1]
    stages = [devices.get_group("pp")] if devices["pp"].size() > 1 else []
    wide = widest(sums.total.device)
    both = summed(torch.stack((sums.total.to(wide), sums.count.to(wide))), *groups, *stages)
    total, count = both[0].to(sums.total.dtype), both[1].to(sums.count.dtype)
    return Sums(
        total, count, tree.map(lambda aux: summed(aux, *groups), sums.aux), sums.grads, sums.divided, sums.unreached
    )


def over_processes(devices: DeviceMesh, total: Tensor, count: Tensor, *aux: Tree) -> tuple[Any, ...]:
    """(sum, count[, aux]) of all ranks from those of each; aux remains that of the pipeline stage."""
    found = _global(Sums(total, count, aux[0] if aux else None, [], False), devices)
    return (found.total, found.count, found.aux) if aux else (found.total, found.count)


def check_whole(shards: Tree) -> None:
    """ValueError if a parameter is sharded, for an optimizer that takes full parameters only."""
    for path, how in tree.flatten(shards).items():
        sharded = [name for (name, size), dim in zip(how.sizes, how.dims, strict=True) if dim is not None and size > 1]
        if sharded:
            raise ValueError(
                f"The optimizer needs full leaves, and {path} is sharded over {sharded[0]}: take one whose update is "
                "elementwise (adamw, sgd, lion), muon, or a mesh that only copies parameters (dp)."
            )


def _on_matrices(shards: Tree) -> OnFull:
    """Applies functions of full matrices to shards: all-gathers the matrix and keeps this rank's shard of the result.

    Stacks of matrices stay sharded along their leading dimensions.
    """
    placed = tree.flatten(shards)

    def run(path: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        how: Sharding = placed[path]
        assert how.mesh is not None
        if any(dim is not None and how.shape[dim] % size for (_, size), dim in zip(how.sizes, how.dims, strict=True)):
            raise ValueError(
                f"{path} is a table whose shards differ in size, and this optimizer gathers matrices: give the table "
                "to another one by train.partition."
            )
        together = x
        for index in reversed(range(len(how.dims))):  # the innermost mesh dimension shards last
            dim = how.dims[index]
            if dim is not None and dim >= x.ndim - 2 and how.sizes[index][1] > 1:
                together = all_gather(together, dim, how.mesh.get_group(index))
        rows, columns = how.local_box()[-2:]
        return function(together)[..., rows, columns]

    return run


def _moved_parts(shards: Tree, params: Tree, counts: Tensor, rate: float, skip: Tensor) -> dict[str, Tensor]:
    """`train.losses.moe_balance.moved_biases` for selection biases that may be sharded."""
    placed = tree.flatten(shards)

    def whole(path: str, x: Tensor) -> Tensor:
        return gather([ParamShard(x, placed[path], x.dtype)])[0] if path.endswith(".selection_bias") else x

    moved = moved_biases(with_paths(whole, params), counts, rate, skip)
    return {path: x[placed[path].local_box()].contiguous() for path, x in moved.items()}

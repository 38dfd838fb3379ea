"""From the sums of all processes to the next State: each updates the parts that it holds, and all see the same norm.

Gradients are whole sums already, of the parts (`gather`); totals, counts and what stands beside them are added up here.
A copy of a leaf counts once in the norm, and an optimizer that needs whole matrices puts them together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree
from params.sharding import Sharding
from train.dist.collectives import all_gather, summed
from train.dist.dtensor import local_tree, placed_like
from train.gradients import Sums
from train.losses.moe_balance import moved_biases
from train.optim.base import OnFull, Optimizer, sharded_version, wide_dtype, with_paths
from train.parallel.pipeline.stages import counted_elsewhere
from train.state import State, consume
from train.update import StepOptions, update

from .fsdp import ParamShard, gather
from .mesh import DATA, whole_groups
from .placement import Placed
from .whole_model import aux_of_stages

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class ShardedUpdate:
    """What updates need to know of the processes' shards."""

    placed: Placed
    optimizer: Optimizer  # of the parts
    norm_of: Callable[[list[Tensor]], Tensor]
    whole_aux: Callable[[Tree], Tree] | None  # of the aux of stages


def sharded_update(placed: Placed, optimizer: Optimizer) -> ShardedUpdate:
    """ValueError for an optimizer that needs more than the shards, or matrices put together from them."""
    parted = sharded_version(optimizer, _on_matrices(placed.shards))
    if parted is None:
        check_whole(placed.shards)
    staged = placed.devices["pp"].size() > 1
    trained, elsewhere = tree.flatten(placed.trains), counted_elsewhere(placed) if staged else frozenset[str]()
    trainable = {path: how for path, how in tree.flatten(placed.shards).items() if trained[path]}
    once = [path.partition(".")[0] not in elsewhere for path in trainable]
    norm_of = norm_over(list(trainable.values()), placed.devices, once)
    return ShardedUpdate(placed, parted or optimizer, norm_of, aux_of_stages(placed) if staged else None)


def update_over(updates: ShardedUpdate, state: State, sums: Sums, options: StepOptions) -> tuple[State, dict[str, Any]]:
    """`train.update.update` with the sums that each process has."""
    held, placed = local_tree(state), updates.placed
    everyone = _global(sums, placed.devices)
    after, metrics = update(
        updates.optimizer,
        held,
        everyone,
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
    placed: Sequence[Sharding], devices: DeviceMesh, counted: Sequence[bool] | None = None
) -> Callable[[list[Tensor]], Tensor]:
    """`global_norm` of gradients of which each process of `devices` holds parts, placed so: a copy counts once.

    counted: False for what another stage counts.
    """
    groups = whole_groups(devices)
    here = [True] * len(placed) if counted is None else counted

    def norm_of(grads: list[Tensor]) -> Tensor:
        wide = wide_dtype(grads[0].dtype) if grads else torch.float32
        square = torch.zeros((), dtype=torch.float64, device=grads[0].device if grads else None)
        for grad, how, counts in zip(grads, placed, here, strict=True):
            if counts and _is_first_copy(how):
                square += torch.linalg.vector_norm(grad, dtype=wide_dtype(grad.dtype)).double().square()
        return summed(square, *groups).sqrt().to(wide)

    return norm_of


def _is_first_copy(how: Sharding) -> bool:
    assert how.mesh is not None
    coordinate = how.mesh.get_coordinate()
    assert coordinate is not None
    places = zip(coordinate, how.dims, how.sizes, strict=True)
    return not any(at for at, dim, (name, _) in places if dim is None and name != "pp")


def _global(sums: Sums, devices: DeviceMesh) -> Sums:
    """The total, the count and the aux of all processes; the gradients are it already."""
    groups = [devices.get_group(name) for name in DATA if devices[name].size() > 1]
    stages = [devices.get_group("pp")] if devices["pp"].size() > 1 else []
    both = summed(torch.stack((sums.total.double(), sums.count.double())), *groups, *stages)
    total, count = both[0].to(sums.total.dtype), both[1].to(sums.count.dtype)
    return Sums(total, count, tree.map(lambda aux: summed(aux, *groups), sums.aux), sums.grads, sums.divided)


def over_processes(devices: DeviceMesh, total: Tensor, count: Tensor, *aux: Tree) -> tuple[Any, ...]:
    """(sum, count[, aux]) of all processes, of what each has; aux is that of a stage."""
    found = _global(Sums(total, count, aux[0] if aux else None, [], False), devices)
    return (found.total, found.count, found.aux) if aux else (found.total, found.count)


def check_whole(shards: Tree) -> None:
    """ValueError where processes have parts of leaves, for an optimizer that takes whole ones alone."""
    for path, how in tree.flatten(shards).items():
        divided = [name for (name, size), dim in zip(how.sizes, how.dims, strict=True) if dim is not None and size > 1]
        if divided:
            raise ValueError(
                f"The optimizer needs whole leaves, and {path} is divided over {divided[0]}: take one whose update is "
                "elementwise (adamw, sgd, lion), muon, or a mesh that only copies parameters (dp)."
            )


def _on_matrices(shards: Tree) -> OnFull:
    """Functions of whole matrices, of which each process has a part: it puts them together, and keeps its part.

    Stacks of matrices that are divided between these stay so.
    """
    placed = tree.flatten(shards)

    def run(path: str, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        how: Sharding = placed[path]
        assert how.mesh is not None
        together = x
        for index in reversed(range(len(how.dims))):  # the last dimension of the mesh divided what the others left
            dim = how.dims[index]
            if dim is not None and dim >= x.ndim - 2 and how.sizes[index][1] > 1:
                together = all_gather(together, dim, how.mesh.get_group(index))
        rows, columns = how.local_box()[-2:]
        return function(together)[..., rows, columns]

    return run


def _moved_parts(shards: Tree, params: Tree, counts: Tensor, rate: float, skip: Tensor) -> dict[str, Tensor]:
    """`train.losses.moe_balance.moved_biases`, of biases that may be divided."""
    placed = tree.flatten(shards)

    def whole(path: str, x: Tensor) -> Tensor:
        return gather([ParamShard(x, placed[path], x.dtype)])[0] if path.endswith(".selection_bias") else x

    moved = moved_biases(with_paths(whole, params), counts, rate, skip)
    return {path: x[placed[path].local_box()].contiguous() for path, x in moved.items()}

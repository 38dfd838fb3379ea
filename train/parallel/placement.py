"""Parameters on a mesh: sharding rules, placed parameters and their shardings."""

import math
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from fnmodels import tree
from fnmodels.tree import Tree
from params.axes import sharded_by
from params.sharding import Rules, Sharding, sharding_of
from train.comm.dtensor import local_tree
from train.optim.base import trainable_mask, with_paths
from train.parallel.mesh import Mesh, Strategy, mesh_of
from train.parallel.ngram_tables import is_table
from train.parallel.tensor.api import tensor_axes


@dataclass(frozen=True)
class Placed:
    """The shardings of a model's parameters over a mesh (`shards`), and which of them are trainable (`trains`)."""

    config: Any
    devices: DeviceMesh
    shards: Tree
    trains: Tree
    strategy: Strategy

    def ranks(self) -> list[int]:
        """The processes of the mesh."""
        found: list[int] = self.devices.mesh.flatten().tolist()
        return found

    def is_of(self, params: Tree) -> bool:
        """Whether `params` have these shardings; by path, since tree nodes such as `Lora` compare by identity."""
        return bool(tree.flatten(self.shards) == tree.flatten(shardings(params)))


def rules_of(mesh: Mesh, config: Any) -> Rules:
    """The sharding rules of this mesh: `tp` and `ep` by logical axis, and the rest spread over `fsdp`."""
    experts = dict.fromkeys(sharded_by("ep"), "ep") if mesh.ep > 1 else {}
    return Rules((tensor_axes(config) if mesh.tp > 1 else {}) | experts, spread="fsdp")


def place(mesh: Mesh, params: Tree, config: Any, strategy: Strategy, trainable: Any) -> Placed:
    """The `Placed` of DTensor params. ValueError unless they lie on `mesh`; trainable: the optimizer's."""
    shards = shardings(params)
    return Placed(config, _devices(shards, mesh), shards, trainable_mask(local_tree(params), trainable), strategy)


def _devices(shards: Tree, mesh: Mesh) -> DeviceMesh:
    """The device mesh of all leaves. ValueError if it is not `mesh`, or if leaves lie on different ones."""
    found: DeviceMesh | None = None
    for path, how in tree.flatten(shards).items():
        if found is None:
            found = how.mesh
        if how.mesh != found:
            raise ValueError(f"{path} lies on another device mesh than the leaves before it; all must lie on one.")
    if found is None or mesh_of(found) != mesh:
        where = "no mesh" if found is None else mesh_of(found)
        raise ValueError(f"The step is made for the mesh {mesh}, and the State's parameters lie on {where}.")
    return found


def shardings(params: Tree) -> Tree:
    """A `Sharding` per leaf of a tree of DTensors. ValueError names a leaf with uneven or interleaved shards."""
    return with_paths(_sharding, params)


def _sharding(path: str, leaf: Any) -> Sharding:
    try:
        made = sharding_of(leaf)
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    if made is None:
        raise ValueError(
            f"{path} is a {type(leaf).__name__}; over a mesh parameters are DTensors, as params.init and "
            "params.load_pretrained make them by a plan: plan=params.plan(spec, rules, mesh.device_mesh())."
        )
    for dim in range(leaf.ndim):
        names = [name for (name, size), d in zip(made.sizes, made.dims, strict=True) if d == dim and size > 1]
        parts = math.prod(dict(made.sizes)[name] for name in names)
        if leaf.shape[dim] % parts and not (dim == 0 and is_table(path)):
            raise ValueError(
                f"{path}: dimension {dim} of {list(leaf.shape)} is not a multiple of the {parts} parts in which "
                f"{' and '.join(names)} shard it; params.plan makes none such."
            )
        inner = [name in ("tp", "ep") for name in names]
        if inner != sorted(inner, reverse=True):
            raise ValueError(
                f"{path}: {' and '.join(names)} shard dimension {dim} in turn, and what {names[-1]} keeps sharded "
                f"would not lie together when {names[0]} is gathered: give {names[0]} another dimension."
            )
    return made

"""DTensors taken apart into local shards and placements, and put together again.

Functions of single leaves run on local shards. A DTensor would search for placements of each operation's result, and on
a mesh of six dimensions there are so many that one `clone` takes a second.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fnmodels import tree
from fnmodels.ops.torch_internals import dtensor_like
from fnmodels.tree import Tree

from .collectives import all_gather

T = TypeVar("T")


def is_dtensor(leaf: Any) -> bool:
    """Whether it is a DTensor, without importing torch.distributed.tensor."""
    return hasattr(leaf, "to_local")


def local_tree(values: Tree) -> Tree:
    """The local shards, as plain tensors that share their memory; leaves that are no DTensors stay as they are."""
    with torch.no_grad():  # with gradients enabled, to_local would return a view
        return tree.map(lambda leaf: leaf.to_local() if is_dtensor(leaf) else leaf, values)


def of_all_stages(params: Tree, mine: T) -> list[T]:
    """`mine` of every pipeline stage (`pp`) of these params' mesh, in order, all-gathered; [mine] for other params."""
    mesh = next((leaf.device_mesh for leaf in tree.leaves(params) if is_dtensor(leaf)), None)
    names = () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is None or "pp" not in names or mesh.size(names.index("pp")) == 1:
        return [mine]
    gathered: list[Any] = [None] * mesh.size(names.index("pp"))
    dist.all_gather_object(gathered, mine, group=mesh.get_group("pp"))
    return gathered


def placed_like(local: Tensor, leaf: Tensor) -> Tensor:
    """`local` as a DTensor placed as `leaf` is; `leaf` itself if it holds this tensor, `local` if it is no DTensor."""
    if not is_dtensor(leaf):
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(leaf, DTensor)
    with torch.no_grad():
        if leaf.to_local() is local:
            return leaf
    if (quick := dtensor_like(local, leaf)) is not None:
        return quick
    made: Tensor = DTensor.from_local(
        local, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
    )
    return made


@torch.no_grad()
def full_tensor(leaf: Any) -> Tensor:
    """The full tensor of a DTensor, in every process."""
    x: Tensor = leaf.to_local()
    for index, dim, full in reversed(_splits(leaf)):  # the last mesh dimension sharded what the others left
        missing = -(-full // leaf.device_mesh.size(index)) - x.shape[dim]
        if missing:  # the last shards may be smaller
            x = torch.cat((x, x.new_empty(*x.shape[:dim], missing, *x.shape[dim + 1 :])), dim)
        x = all_gather(x, dim, leaf.device_mesh.get_group(index)).narrow(dim, 0, full)
    return x


def _splits(leaf: Any) -> list[tuple[int, int, int]]:
    """(mesh dimension, dimension of the leaf that it shards, its size before that in this process) in order."""
    found, left = [], list(leaf.shape)
    for index, rank in enumerate(leaf.device_mesh.get_coordinate()):
        placement, size = leaf.placements[index], leaf.device_mesh.size(index)
        if placement.is_shard() and size > 1:
            full = left[placement.dim]
            each = -(-full // size)
            left[placement.dim] = min(each, max(full - rank * each, 0))
            found.append((index, placement.dim, full))
    return found


def map_local(function: Callable[[Tensor], Tensor], values: Tree) -> Tree:
    """`tree.map` of a function that keeps shapes, run on local shards."""
    return tree.map(lambda local, leaf: placed_like(function(local), leaf), local_tree(values), values)


def like_params(opt_state: Tree, params: Tree) -> Tree:
    """Places an optimizer's state, made from local shards of `params`: leaves at a parameter's path go where it is.

    "exp_avg.layers.0.norm" is placed as "layers.0.norm"; leaves of another shape, such as step counts, stay plain.
    """
    placed = {path: leaf for path, leaf in tree.flatten(params).items() if is_dtensor(leaf)}
    paths = iter(tree.flatten(opt_state))

    def one(local: Tensor) -> Tensor:
        words = next(paths).split(".")
        of = next((placed[".".join(words[i:])] for i in range(len(words)) if ".".join(words[i:]) in placed), None)
        if of is None or local.shape != local_tree(of).shape:
            return local
        return placed_like(local, of)

    return tree.map(one, opt_state)

"""DTensors as what they are made of: this process' part, and where the rest lies.

Functions of single leaves run on the parts. A DTensor would look for ways to place the result of each operation, and on
a mesh of six dimensions there are so many that one `clone` takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree

from .collectives import all_gather


def is_dtensor(leaf: Any) -> bool:
    """Whether it is a DTensor, without importing what they are."""
    return hasattr(leaf, "to_local")


def local_tree(values: Tree) -> Tree:
    """The parts that this process holds, as plain tensors that share their memory; what is no DTensor as it is."""
    with torch.no_grad():  # with gradients to_local would make a view of it
        return tree.map(lambda leaf: leaf.to_local() if is_dtensor(leaf) else leaf, values)


def placed_like(local: Tensor, leaf: Tensor) -> Tensor:
    """`local` placed as `leaf` is; that itself where it holds the same tensor, `local` where it is no DTensor."""
    if not is_dtensor(leaf):
        return local
    from torch.distributed.tensor import DTensor

    assert isinstance(leaf, DTensor)
    with torch.no_grad():
        if leaf.to_local() is local:
            return leaf
    made: Tensor = DTensor.from_local(
        local, leaf.device_mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
    )
    return made


@torch.no_grad()
def full_tensor(leaf: Any) -> Tensor:
    """All of a DTensor whose parts are equally large, in every process."""
    x: Tensor = leaf.to_local()
    for index in reversed(range(leaf.device_mesh.ndim)):  # the last dimension divided what the others left
        placement = leaf.placements[index]
        if placement.is_shard() and leaf.device_mesh.size(index) > 1:
            x = all_gather(x, placement.dim, leaf.device_mesh.get_group(index))
    return x


def map_local(function: Callable[[Tensor], Tensor], values: Tree) -> Tree:
    """`tree.map` of a function that keeps shapes, run on the parts."""
    return tree.map(lambda local, leaf: placed_like(function(local), leaf), local_tree(values), values)


def like_params(opt_state: Tree, params: Tree) -> Tree:
    """An optimizer's state, made of the parts of `params`: leaves at a parameter's path are placed as that is.

    So is "exp_avg.layers.0.norm" as "layers.0.norm"; leaves of another shape, as counts of steps, stay what they are.
    """
    spread = {path: leaf for path, leaf in tree.flatten(params).items() if is_dtensor(leaf)}
    paths = iter(tree.flatten(opt_state))

    def one(local: Tensor) -> Tensor:
        words = next(paths).split(".")
        of = next((spread[".".join(words[i:])] for i in range(len(words)) if ".".join(words[i:]) in spread), None)
        if of is None or local.shape != local_tree(of).shape:
            return local
        return placed_like(local, of)

    return tree.map(one, opt_state)

"""Functional FSDP: parameters are sharded; each layer all-gathers its own just before it runs.

    held = local_tree(params)                                     # DTensors -> plain tensors, the same memory
    loss_fn = gathering(functools.partial(next_token_loss, config=config), shardings(params))
    total, count = loss_fn(held, rows)                            # of this rank's rows: sums are local
    grads = torch.autograd.grad(total, tree.leaves(held))         # of the sum over all ranks, each rank its shard

Layers gather inside the rematerialised region, so backward gathers them again. All operations are known to torch.func.
Gradients are sums over tokens: the rank's shard of the sum where a parameter is sharded over ranks with different
tokens (reduce-scatter), the full sum where it is replicated (all-reduce). Parameters stay sharded over `tp` and `ep`,
whose wrappers run inside this one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.options import Block
from fnmodels.tree import Tree
from params.sharding import Sharding
from train.comm.collectives import all_gather, enter, enter_all
from train.loss import ModelLoss, as_loss
from train.optim.base import wide_dtype, with_paths

from .mesh import DATA
from .ngram_tables import ShardedTable, is_sharded_table, sharded_table
from .tensor.leaf_roles import path_in_layer

Watch = Callable[[str, Tensor], None]  # (path, parameter)


@dataclass(frozen=True, eq=False)
class ParamShard:
    """This rank's shard of a parameter, its sharding, and the dtype in which the model sees the parameter.

    gathered: is called with the parameter each time that it was gathered. in_place: it is a table that stays sharded.
    """

    local: Tensor
    sharding: Sharding
    dtype: torch.dtype
    gathered: Callable[[Tensor], None] | None = None
    in_place: bool = False

    def to(self, dtype: torch.dtype) -> ParamShard:
        """The parameter in another dtype, for a loss that casts its params."""
        return replace(self, dtype=dtype)


def gather(shards: Sequence[ParamShard]) -> list[Tensor]:
    """The full parameters, differentiably; those that `tp` or `ep` shard too stay sharded over these.

    Shards with one placement are gathered together: a layer takes one all-gather, and its gradients one reduction.
    """
    alike: dict[Any, list[int]] = {}
    for index, shard in enumerate(shards):
        alike.setdefault(_placement(shard), []).append(index)
    found: list[Any] = [None] * len(shards)
    for (replicated, gathered, _, dtype), chosen in alike.items():
        same = [shards[index] for index in chosen]
        mesh: Any = same[0].sharding.mesh
        xs = _gather_alike(same, map(mesh.get_group, replicated), [(mesh.get_group(n), n) for n in gathered], dtype)
        for index, x in zip(chosen, xs, strict=True):
            found[index] = x
    for shard, x in zip(shards, found, strict=True):
        if shard.gathered is not None:
            shard.gathered(x)
    return found


def _placement(shard: ParamShard) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Any, ...], torch.dtype]:
    """(mesh dimensions that replicate, those to gather over, dtype and requires_grad of the shard, target dtype)."""
    how, x = shard.sharding, shard.local
    data = [(name, dim) for (name, n), dim in zip(how.sizes, how.dims, strict=True) if n > 1 and name in DATA]
    replicated = tuple(name for name, dim in data if dim is None)
    gathered = tuple(name for name, dim in data if dim is not None and name != "ep")
    return replicated, gathered, (x.dtype, x.requires_grad), shard.dtype


def _gather_alike(
    shards: list[ParamShard], replicated: Iterable[Any], gathered: list[tuple[Any, str]], dtype: torch.dtype
) -> list[Tensor]:
    """The full parameters of shards that have one placement."""
    xs = [shard.local for shard in shards]
    if xs[0].is_floating_point() and xs[0].requires_grad:
        xs = [x.to(wide_dtype(x.dtype)) for x in xs]  # gradients are summed in fp32 at least
    if not gathered:  # forward sends nothing, so no flat copy is needed
        for group in replicated:
            xs = enter_all(xs, group)
        return [x.to(dtype) for x in xs]
    stored = xs[0].dtype
    as_bytes = stored.itemsize == 1 or not stored.is_floating_point  # backends lack 8-bit floats and unsigned words
    flat = torch.cat([x.flatten().view(torch.uint8) if as_bytes else x.flatten() for x in xs])
    for group in replicated:
        flat = enter(flat, group)
    for group, _ in reversed(gathered):  # the innermost mesh dimension shards last
        flat = all_gather(flat[None], 0, group, dtype=torch.uint8 if as_bytes else dtype)
    flat = flat.view(stored) if as_bytes else flat
    pieces, names = flat.split([x.numel() for x in xs], -1), [name for _, name in gathered]
    return [_assembled(piece, shard, names) for piece, shard in zip(pieces, shards, strict=True)]


def _assembled(piece: Tensor, shard: ParamShard, names: list[str]) -> Tensor:
    """The parameter from `piece` [n, m, ..., elements], its flat shards along the mesh dimensions `names`."""
    x = piece.unflatten(-1, shard.local.shape)
    dims = {name: dim for (name, _), dim in zip(shard.sharding.sizes, shard.sharding.dims, strict=True)}
    for axis in reversed(range(len(names))):
        dim = dims[names[axis]]
        assert dim is not None
        x = x.movedim(axis, axis + dim).flatten(axis + dim, axis + dim + 1)
    return x.contiguous()


def gather_layers(block: Block) -> Block:
    """A `layer_fn` that gathers the `ParamShard`s of its layer before the block; other leaves are unchanged."""

    def run(layer: Tree, *args: Any, **more: Any) -> Any:
        return block(_gathered(layer), *args, **more)

    return run


def sharded_params(
    shards: Tree, *, dtype: torch.dtype | None = None, trains: Tree | None = None, watch: Watch | None = None
) -> Callable[[Tree], Tree]:
    """params(held) -> the params of a loss: layers as `ParamShard`s, for `gather_layers`, all else gathered.

    Tables of n-grams stay sharded, see `ngram_tables`.

    held: `local_tree` of params with the shardings `shards`, or of a pipeline stage's share of them. Blocks of MTP
    heads count as layers. dtype: in which floating-point parameters are gathered and used, None for their own. trains:
    a tree of bools; parameters without a gradient (a router's bias) keep their own dtype. watch: is called with each
    parameter that was gathered.
    """
    places = tree.flatten(shards)
    chosen = dict.fromkeys(places, True) if trains is None else tree.flatten(trains)

    def shard(path: str, x: Tensor) -> ParamShard:
        wanted = dtype if dtype and chosen[path] and x.is_floating_point() else x.dtype
        seen = None if watch is None else functools.partial(watch, path)
        return ParamShard(x, places[path], wanted, seen, is_sharded_table(path, places[path]))

    def params(held: Tree) -> Tree:
        made = with_paths(shard, held)
        outside = {path: x for path, x in tree.flatten(made).items() if path_in_layer(path) is None}
        whole = dict(zip(outside, usable(list(outside.values())), strict=True))
        return with_paths(lambda path, x: whole.get(path, x), made)

    return params


def gathering(function: Callable[..., Any], shards: Tree) -> ModelLoss:
    """function(params, batch) on a rank's shards, `local_tree(params)`.

    Parameters outside "layers" are gathered at the start, each layer's when it runs. shards: `shardings(params)`.
    """
    required = {"required": "Layers are gathered where they run"}
    loss = as_loss(function).with_options(blocks={"outer": gather_layers}, reports=required)
    return replace(loss, params=sharded_params(shards))


def usable(shards: Sequence[ParamShard]) -> list[Any]:
    """The parameters that a loss computes with: gathered, and tables of n-grams as `ShardedTable`s."""
    whole = iter(gather([shard for shard in shards if not shard.in_place]))
    return [_table(shard) if shard.in_place else next(whole) for shard in shards]


def _table(shard: ParamShard) -> ShardedTable:
    table = sharded_table(shard.local, shard.sharding, shard.dtype)
    if shard.gathered is not None:
        shard.gathered(table.weight)
    return table


def _gathered(values: Tree) -> Tree:
    leaves = tree.leaves(values)
    found = iter(usable([leaf for leaf in leaves if isinstance(leaf, ParamShard)]))
    return tree.map(lambda leaf: next(found) if isinstance(leaf, ParamShard) else leaf, values)

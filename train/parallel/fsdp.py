"""Functional FSDP: parameters lie in parts, and each layer's are gathered where it runs, inside of what is recomputed.

    held = dtensors.local_tree(params)                            # DTensors -> plain tensors, the same memory
    loss_fn = gathering(functools.partial(next_token_loss, config=config), shardings(params))
    total, count = loss_fn(held, rows)                            # of this process' rows: sums are local
    grads = torch.autograd.grad(total, tree.leaves(held))         # of the sum over all processes, each its part

Between the two stands nothing that a transform does not know, so that torch.func goes through: `torch.func.jvp(loss,
(held,), (tangents,))` is this process' share of the directional derivative, and forward over reverse gives its part of
the Hessian times a vector.

Gradients are sums over tokens. A leaf that is divided over processes with different tokens gets its part of the sum
(reduce-scatter), and one of which they hold copies the whole sum (all-reduce); both in HSDP, where the all-reduce is of
the part. What `tp` and `ep` divide stays so, for the wrapper inside of this one: tokens come to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.options import Block, LayerFn
from fnmodels.tree import Tree
from params.sharding import Sharding
from train.dist.collectives import all_gather, enter, enter_all
from train.optim.base import wide_dtype, with_paths

from .mesh import DATA


@dataclass(frozen=True, eq=False)
class Part:
    """What this process holds of a leaf, how the rest lies, and the dtype in which the model wants to see it."""

    local: Tensor
    sharding: Sharding
    dtype: torch.dtype


def gather(parts: Sequence[Part]) -> list[Tensor]:
    """The whole leaves, differentiably; of one that `tp` or `ep` divide, the part of it that is theirs.

    What lies alike travels together: a layer is one message, and so are its gradients.
    """
    alike: dict[Any, list[int]] = {}
    for index, part in enumerate(parts):
        alike.setdefault(_way(part), []).append(index)
    found: list[Any] = [None] * len(parts)
    for (copied, gathered, _, dtype), chosen in alike.items():
        group = functools.partial(_group, parts[chosen[0]].sharding)
        xs = _joined([parts[index] for index in chosen], map(group, copied), [(group(n), n) for n in gathered], dtype)
        for index, x in zip(chosen, xs, strict=True):
            found[index] = x
    return found


def _way(part: Part) -> tuple[tuple[str, ...], tuple[str, ...], tuple[Any, ...], torch.dtype]:
    """(mesh dimensions that hold copies, those to gather over, what else must be equal to travel together, dtype)."""
    how, x = part.sharding, part.local
    data = [(name, dim) for (name, n), dim in zip(how.sizes, how.dims, strict=True) if n > 1 and name in DATA]
    copied = tuple(name for name, dim in data if dim is None)
    gathered = tuple(name for name, dim in data if dim is not None and name != "ep")
    return copied, gathered, (x.dtype, x.requires_grad), part.dtype


def _joined(
    parts: list[Part], copied: Iterable[Any], gathered: list[tuple[Any, str]], dtype: torch.dtype
) -> list[Tensor]:
    """The leaves of parts that all lie one way."""
    xs = [part.local for part in parts]
    if xs[0].is_floating_point() and xs[0].requires_grad:
        xs = [x.to(wide_dtype(x.dtype)) for x in xs]  # gradients are summed in fp32 at least
    if not gathered:  # nothing to send on the way in, so nothing to copy
        for group in copied:
            xs = enter_all(xs, group)
        return [x.to(dtype) for x in xs]
    flat = torch.cat([x.flatten() for x in xs])
    for group in copied:
        flat = enter(flat, group)
    for group, _ in reversed(gathered):  # the last dimension of the mesh divided what the others left
        flat = all_gather(flat[None], 0, group, dtype=dtype)
    pieces = flat.split([x.numel() for x in xs], -1)
    return [_assembled(piece, part, [name for _, name in gathered]) for piece, part in zip(pieces, parts, strict=True)]


def _assembled(piece: Tensor, part: Part, names: list[str]) -> Tensor:
    """[n, m, ..., numbers] of the parts along some mesh dimensions: the leaf."""
    x = piece.unflatten(-1, part.local.shape)
    dims = {name: dim for (name, _), dim in zip(part.sharding.sizes, part.sharding.dims, strict=True)}
    for axis in reversed(range(len(names))):
        dim = axis + _known(dims[names[axis]])
        x = x.movedim(axis, dim).flatten(dim, dim + 1)
    return x.contiguous()


def _known(dim: int | None) -> int:
    assert dim is not None
    return dim


def gather_layers(block: Block) -> Block:
    """A `layer_fn`: the block with the `Part`s of its layer gathered; what is none is passed on."""

    def run(layer: Tree, *args: Any, **more: Any) -> Any:
        return block(_gathered(layer), *args, **more)

    return run


def gathering_stages(
    shards: Tree, *, dtype: torch.dtype | None = None, trains: Tree | None = None
) -> tuple[LayerFn, Callable[[Tree], Tree]]:
    """(layer_fn, outside) for `pipeline.gradient_sums` on parts of leaves: there, what `gathering` is elsewhere.

    shards: of this rank's `pipeline.share`, on the mesh of the ranks that have the same one. dtype, trains: as there.
    Leaves of one name lie alike in all layers.
    """
    chosen = dict.fromkeys(tree.flatten(shards), True) if trains is None else tree.flatten(trains)
    places = {_in_layer(path): (how, chosen[path]) for path, how in tree.flatten(shards).items()}

    def part(path: str, x: Tensor) -> Part:
        how, learns = places[path]
        return Part(x, how, dtype if dtype and learns and x.is_floating_point() else x.dtype)

    def parted(values: Tree) -> Tree:
        return with_paths(part, values)

    def layer_fn(block: Block) -> Block:
        inner = gather_layers(block)
        return lambda layer, *args, **more: inner(parted(layer), *args, **more)

    def outside(outer: Tree) -> Tree:
        # The layers of heads for further tokens are gathered where they run, as others are.
        return _gathered(with_paths(lambda path, x: part(path, x) if _in_layer(path) == path else x, outer))

    return layer_fn, outside


def _in_layer(path: str) -> str:
    """The path within a layer, of which heads that predict further tokens hold one too; other paths as they are."""
    parts = path.split(".")
    if parts[0] == "mtp" and parts[2] == "block":
        return ".".join(parts[3:])
    return ".".join(parts[2:]) if parts[0] == "layers" else path


def gathering(
    function: Callable[..., Any],
    shards: Tree,
    *,
    dtype: torch.dtype | None = None,
    trains: Tree | None = None,
) -> Callable[..., Any]:
    """function(params, batch, layer_fn=, ...) as one of the parts that processes hold: `local_tree(params)`.

    Leaves outside of "layers" are gathered at the start, each layer's when it runs: inside of the `layer_fn` that the
    result is given, so that what remat recomputes, it gathers again. shards: `shardings(params)`. dtype: in which
    floating leaves are sent and used, None for their own; `trains`, a tree of bools, keeps what does not learn (a
    router's bias) in its own.
    """

    @functools.wraps(function)  # who asks for its keywords gets those of `function`
    def run(held: Tree, batch: Mapping[str, Tensor], *, layer_fn: LayerFn | None = None, **more: Any) -> Any:
        chosen = tree.map(lambda _: True, held) if trains is None else trains
        parts = tree.map(
            lambda x, how, learns: Part(x, how, dtype if dtype and learns and x.is_floating_point() else x.dtype),
            held,
            shards,
            chosen,
        )
        rest = _gathered({name: values for name, values in parts.items() if name != "layers"})
        given = {name: values if name == "layers" else rest[name] for name, values in parts.items()}

        def wrap(block: Block) -> Block:
            block = gather_layers(block)
            return block if layer_fn is None else layer_fn(block)

        return function(given, batch, layer_fn=wrap, **more)

    return run


def _gathered(parts: Tree) -> Tree:
    leaves = tree.leaves(parts)
    found = iter(gather([leaf for leaf in leaves if isinstance(leaf, Part)]))
    return tree.map(lambda leaf: next(found) if isinstance(leaf, Part) else leaf, parts)


def _group(sharding: Sharding, name: str) -> Any:
    assert sharding.mesh is not None
    return sharding.mesh.get_group(name)

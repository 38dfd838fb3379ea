"""Weights on their way to a rollout, under the names of a checkpoint: full tensors, shards, or adapters alone."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

import params as P
from fnmodels import tree
from fnmodels.errors import UnsupportedError
from fnmodels.models.common.family import DecoderConfig
from fnmodels.tree import Tree
from params.checkpoint.tensor_map import duplicate_names, pieces, stored_leaves
from params.sharding import sharding_of
from train.parallel.whole_model import fetching

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Shard:
    """A part of a tensor of a checkpoint: `tensor` is its elements [box], of all `shape`."""

    tensor: Tensor
    box: Box
    shape: tuple[int, ...]


def full_tensors(config: DecoderConfig, params: Tree, *, adapters: bool = False) -> Iterator[tuple[str, Tensor]]:
    """`params.export` of parameters that may be sharded, also over pp: all ranks iterate alike.

    Adapters are merged into their weights; adapters=True exports them alone, under PEFT's names. ValueError where there
    are none; UnsupportedError as `params.lora.export_adapters`.
    """
    given = P.lora.adapters(params) if adapters else P.lora.merge(params)
    if not tree.leaves(given):
        raise ValueError("The engine's params hold no adapters to export; params.lora.add makes them.")
    export = P.lora.export_adapters if adapters else P.export
    if sharding_of(tree.leaves(given)[0]) is None:
        return export(config, given)
    leaves, fetch = fetching(given)
    return export(config, tree.unflatten(leaves), fetch)


def shards(config: DecoderConfig, params: Tree) -> Iterator[tuple[str, Shard]]:
    """(name, this process' `Shard`) of each tensor of which it holds elements; nothing is communicated.

    Adapters are merged. Over pp these are the tensors of this rank's layers; replicas have equal shards. Experts are a
    tensor each. UnsupportedError names a parameter that is a slice of a fused tensor on disk, whose shards may be no
    boxes of that.
    """
    flat: dict[str, Tensor] = tree.flatten(P.lora.merge(params))
    stored = {one.path: one for one in stored_leaves(config)}
    parts = [(piece, flat[path]) for path in flat for piece in pieces(stored[path])]
    for piece, _ in parts:
        if not isinstance(piece.stored, str):
            raise UnsupportedError(
                f"{piece.path} is a slice of {piece.stored.name} on disk, so its shards are no boxes of that: export "
                "full tensors."
            )
    copies: dict[str, list[str]] = {}
    for copy, name in duplicate_names(config).items():
        copies.setdefault(name, []).append(copy)

    def made() -> Iterator[tuple[str, Shard]]:
        for piece, leaf in parts:
            assert isinstance(piece.stored, str)
            sharding = sharding_of(leaf)
            local = (leaf if sharding is None else leaf.to_local()).detach()  # type: ignore[attr-defined]
            box = tuple(slice(0, n) for n in leaf.shape) if sharding is None else sharding.local_box()
            first, *rest = box
            if isinstance(piece.index, slice):
                low, high = max(first.start, piece.index.start), min(first.stop, piece.index.stop)
                if low >= high:
                    continue
                local = local[low - first.start : high - first.start]
                box = (slice(low - piece.index.start, high - piece.index.start), *rest)
            elif piece.index is not None:
                if not first.start <= piece.index < first.stop:
                    continue
                local, box = local[piece.index - first.start], tuple(rest)
            for name in (piece.stored, *copies.get(piece.stored, ())):
                yield name, Shard(local, box, piece.disk_shape)

    return made()

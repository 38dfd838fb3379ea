"""Tensors that layers leave for later ones beside the residual stream, so that a stack can be run in parts.

`fnmodels.run_layers` takes and returns it as `carried`, a tree with these entries where a later layer reads them:

    chosen    int64 [B, S, k], the last choice of keys, for layers without an indexer; see `fnmodels.ops.indexer`
    kv        {kind: {"k", "v"}}, each [B, S, heads, H], which layers of another kind borrow from the last of this one,
              or, for rows of so many keys over all ranks, what the family's `lent_like` says; kind: a `LayerKind.stem`
    left      [B, S, D], or as the family's `left_shape` says: what a layer leaves for the next one, which adds it to
              the residual stream, reads it or passes it on
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fnmodels.ops.slots import Entry
from fnmodels.tree import Tree

from .family import LayerKind, field_of, function_of, parsed, traits_of
from .registry import family_of


def stream_shape(config: Any, index: int) -> tuple[int, ...]:
    """The dimensions after [B, S] of the residual stream before layer `index` of a stack: (n, D) or (D,)."""
    streams = field_of(config, "residual_streams")
    inside = streams and 0 < index < config.num_hidden_layers
    return (streams, config.hidden_size) if inside else (config.hidden_size,)


def own_choices(kinds: Sequence[str]) -> list[int]:
    """The layers with an indexer of their own."""
    layers = enumerate(map(LayerKind.parse, kinds))
    return [index for index, kind in layers if kind.indexed and not kind.shares_choice]


def shares_rows(family: Any) -> bool:
    """Whether its layers read tensors of full rows, by its function `shared`, of which a piece of a row has others."""
    traits = traits_of(family)
    return hasattr(family, "shared") and not (traits.reads_ids or traits.shares_tables)


def takes_choice(kinds: Sequence[str], index: int) -> bool:
    """Whether a layer from `index` on takes its choice of keys from a layer before `index`."""
    first = next((i for i in range(index, len(kinds)) if LayerKind.parse(kinds[i]).indexed), None)
    return first is not None and first not in own_choices(kinds)


def borrowed(kinds: Sequence[str], index: int) -> list[str]:
    """The kinds, by their stems, whose keys and values layers from `index` on borrow from layers before `index`."""
    found = parsed(kinds)
    lending = [None if kind.lender else kind.stem for kind in found]
    lenders = ((i, kind.lender) for i, kind in enumerate(found) if i >= index)
    return list(dict.fromkeys(lender for i, lender in lenders if lender and lender not in lending[index:i]))


def joins(kinds: Sequence[str], index: int) -> bool:
    """Whether layer `index` reads what the layer before it has left."""
    return index < len(kinds) and LayerKind.parse(kinds[index]).joins


def left_like(config: Any, index: int, x: Tensor) -> Tensor:
    """A tensor like what the layer before `index` leaves, on the meta device. x: of its rows, tokens and dtype."""
    family = family_of(config)
    dtype = torch.promote_types(x.dtype, torch.float32) if traits_of(family).left_wide else x.dtype
    shape = function_of(family, "left_shape")(config, index)
    return torch.empty(*x.shape[:2], *shape, dtype=dtype, device="meta")


def left_for(
    kinds: Sequence[str], index: int, chosen: Tensor | None, lent: Mapping[str, Entry], left: Tensor | None
) -> Tree:
    """The `carried` of layers from `index` on; ValueError without keys and values that one of them borrows.

    chosen, lent, left: the last choice of the layers before, by kind their keys and values, and what the last of them
    has left for the next one.
    """
    found: Tree = {}
    if left is not None and joins(kinds, index):
        found["left"] = left
    if chosen is not None and takes_choice(kinds, index):
        found["chosen"] = chosen
    sources = borrowed(kinds, index)
    if missing := [kind for kind in sources if kind not in lent]:
        raise ValueError(
            f"Layers from {index} on borrow the keys and values of the last layer of kind {missing[0]!r}, which has "
            "not run: pass `carried` of the layers before it."
        )
    if sources:
        found["kv"] = {kind: lent[kind] for kind in sources}
    return found


class Passing:
    """Methods of a `Context` by which layers leave tensors for later ones."""

    tensors: Mapping[str, Any]
    aux: dict[str, Any]

    def lend(self, **tensors: Tensor) -> None:
        """Lends tensors to later layers, whose kind has the word "reads"; see `lent_like` of families."""
        self.aux["kv"] = tensors

    def lent(self) -> Entry:
        """What the last layer of the kind `LayerKind.beside` has lent."""
        value: Entry = self.tensors["kv"]
        return value

    def leave(self, value: Tensor) -> None:
        """Leaves value [B, S, ..., D] for the next layer, whose kind has the word "joins"; see `left_shape`."""
        self.aux["left"] = value

    def left(self) -> Tensor:
        """The tensor that the layer before has left for this one."""
        value: Tensor = self.tensors["left"]
        return value

"""Tensors that layers leave for later ones beside the residual stream, so that a stack can be run in parts.

`fnmodels.run_layers` takes and returns it as `carried`, a tree with these entries where a later layer reads them:

    chosen    int64 [B, S, k], the last choice of keys, for layers without an indexer; see `fnmodels.ops.indexer`
    kv        {kind: {"k", "v"}}, each [B, S, heads, H], which layers of another kind borrow from the last of this one
    left      [B, S, D], or as the family's `left_shape` says: what a layer leaves for the next one, which adds it to
              the residual stream, reads it or passes it on
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fnmodels.models.common.family import own_choices
from fnmodels.ops.slots import Entry
from fnmodels.tree import Tree

from .family import LayerKind, parsed


def takes_choice(kinds: Sequence[str], index: int) -> bool:
    """Whether a layer from `index` on takes its choice of keys from a layer before `index`."""
    first = next((i for i in range(index, len(kinds)) if LayerKind.parse(kinds[i]).indexed), None)
    return first is not None and first not in own_choices(kinds)


def borrowed(kinds: Sequence[str], index: int) -> list[str]:
    """The kinds whose keys and values layers from `index` on borrow from layers before `index`."""
    sources = ((i, kind.source) for i, kind in enumerate(parsed(kinds)) if i >= index)
    return list(dict.fromkeys(source for i, source in sources if source and source not in kinds[index:i]))


def joins(kinds: Sequence[str], index: int) -> bool:
    """Whether layer `index` reads what the layer before it has left."""
    return index < len(kinds) and LayerKind.parse(kinds[index]).joins


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

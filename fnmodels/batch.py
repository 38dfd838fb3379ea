"""One rule for everything order-sensitive: dimension 0 is the batch and dimension 1 the sequence of every tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import tree
from .convert import is_block_mask
from .mask import Layout
from .tree import Tree


def rows(batch: Tree) -> Tree:
    """[B, ...] -> [B, 1, ...] on every tensor, so that vmap over dimension 0 hands each call a batch of one."""
    _tensors("give a batch dimension to", batch)
    return tree.map(lambda tensor: tensor.unsqueeze(1), batch)


def permute(batch: Tree, order: Tensor) -> Tree:
    """One permutation of the sequence on every tensor. order: [S] or [B, S]; out[:, i] = in[:, order[:, i]].

    Raises ValueError for a tensor without that sequence dimension and for dense masks, which hold the sequence twice:
    permute the mask as data (`fnmodels.Mask`) and make the dense one after.
    """
    length = order.shape[-1]
    for path, tensor in _tensors("permute", batch).items():
        wrong = tensor.ndim < 2 or tensor.shape[1] != length
        # Of bool before all else: a mask per head has a dimension 1 too, which may be as long as the sequence.
        dense = tensor.ndim == 4 and tensor.shape[-2:] == (length, length) and (wrong or tensor.dtype == torch.bool)
        if wrong or dense:
            why = "it is a dense mask; permute a Mask instead" if dense else f"dimension 1 is no sequence of {length}"
            raise ValueError(f"Cannot permute {path!r} of shape {tuple(tensor.shape)}: {why}.")

    def one(tensor: Tensor) -> Tensor:
        if order.ndim == 1:
            return tensor.index_select(1, order)
        index = order.reshape(*order.shape, *[1] * (tensor.ndim - 2)).expand(-1, -1, *tensor.shape[2:])
        return tensor.expand(order.shape[0], *tensor.shape[1:]).gather(1, index)

    return tree.map(one, batch)


def split(batch: Tree, n: int) -> list[Tree]:
    """`n` trees, each with an equal share of the rows. Raises ValueError where a batch does not divide."""
    if n < 1:
        raise ValueError(f"A batch is split in one part or more, not in {n}.")
    for path, tensor in _tensors("split", batch).items():
        size = tensor.shape[0] if tensor.ndim else None
        if size is None or size % n:
            raise ValueError(f"Cannot split {path!r} in {n}: its batch dimension is {size}, which {n} does not divide.")
    return [tree.map(lambda tensor, i=i: tensor.chunk(n)[i], batch) for i in range(n)]


def _tensors(act: str, batch: Tree) -> dict[str, Tensor]:
    """{path: tensor}; ValueError for a leaf that is none."""
    found: dict[str, Any] = tree.flatten(batch)
    for path, leaf in found.items():
        if isinstance(leaf, Tensor):
            continue
        if is_block_mask(leaf):
            why = "it is a BlockMask, which holds indices: do it to a fnmodels.Mask, and make the BlockMask after"
        elif isinstance(leaf, Layout):
            why = "it is a Layout, which belongs to one batch in one order: leave it out, and make it anew after"
        else:
            why = f"it is a {type(leaf).__name__} and no tensor"
        raise ValueError(f"Cannot {act} {path!r}: {why}.")
    return found

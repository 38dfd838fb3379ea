"""Batch transforms (`rows`, `permute`, `split`) on trees of tensors [B, S, ...], masks and rotary tables included."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree

from .block_mask import is_block_mask
from .documents import Documents
from .layout import Layout
from .order import Segments
from .values import has_values


def rows(batch: Tree) -> Tree:
    """Gives every row a batch dimension of 1, so that vmap over dimension 0 passes each call a batch of one row.

    Args:
        batch: A tree of tensors [B, ...].

    Returns:
        The tree of [B, 1, ...].

    Raises:
        ValueError: A tensor has no dimensions, such as one seed of dropout: rows take their keys, `noise_keys`.
    """
    for path, tensor in _tensors("give a batch dimension to", batch).items():
        if not tensor.ndim:
            raise ValueError(
                f"The batch's {path!r} is 0-d, and rows take tensors [B, ...]: repeat a number for each row, "
                "and make keys of a seed of dropout, fnmodels.inputs.noise_keys(seed, positions, segment_ids)."
            )
    return tree.map(lambda tensor: tensor.unsqueeze(1), batch)


def permute(batch: Tree, order: Tensor) -> Tree:
    """Permutes the sequence dimension of every tensor: out[:, i] = in[:, order[:, i]].

    Args:
        batch: A tree of tensors [B, S, ...].
        order: A permutation, int64 [S] or [B, S]; [1, S] applies to all rows.

    Returns:
        The permuted tree.

    Raises:
        ValueError: The order is no permutation (checked on the CPU in eager mode only), a tensor has no such sequence
            dimension, or masks hold `Segments`, of a model whose layers depend on order. So is a dense mask, which
            holds the sequence twice: permute the `fnmodels.inputs.Mask`, and make the dense one afterwards.
    """
    if tree.contains(batch, Segments):
        raise ValueError(
            "Cannot permute this batch: its masks hold Segments, those of layers that read tokens in their order "
            "(recurrent layers, convolutions), which in another order compute another function."
        )
    order = order[0] if order.ndim == 2 and order.shape[0] == 1 else order
    length = order.shape[-1] if order.ndim else 0
    _check_order(order)
    order = order.long()
    for path, tensor in _tensors("permute", batch).items():
        wrong = tensor.ndim < 2 or tensor.shape[1] != length
        # bool is decisive: in a mask per head, dimension 1 (heads) may happen to be as long as the sequence.
        dense = tensor.ndim == 4 and tensor.shape[-2:] == (length, length) and (wrong or tensor.dtype == torch.bool)
        if wrong or dense:
            why = "it is a dense mask; permute a Mask instead" if dense else f"dimension 1 is no sequence of {length}"
            raise ValueError(f"Cannot permute {path!r} of shape {tuple(tensor.shape)}: {why}.")
        if order.ndim == 2 and tensor.shape[0] not in (order.shape[0], 1):
            raise ValueError(f"Cannot permute {path!r} of {tensor.shape[0]} rows: the order is of {order.shape[0]}.")

    def one(tensor: Tensor) -> Tensor:
        if order.ndim == 1:
            return tensor.index_select(1, order)
        index = order.reshape(*order.shape, *[1] * (tensor.ndim - 2)).expand(-1, -1, *tensor.shape[2:])
        return tensor.expand(order.shape[0], *tensor.shape[1:]).gather(1, index)

    return tree.map(one, batch)


def _check_order(order: Tensor) -> None:
    if order.ndim not in (1, 2) or order.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"An order is [S] or [B, S] of int64, not {list(order.shape)} of {order.dtype}.")
    if torch.compiler.is_compiling() or not has_values(order) or not order.is_cpu:
        return  # its values cannot be read, or not without a device sync
    if not order.sort(dim=-1).values.equal(torch.arange(order.shape[-1], dtype=order.dtype).expand_as(order)):
        raise ValueError(f"An order of {order.shape[-1]} tokens has each number below that once; this one does not.")


def split(batch: Tree, n: int) -> list[Tree]:
    """Splits a batch by rows.

    Args:
        batch: A tree of tensors [B, ...].
        n: The number of parts.

    Returns:
        `n` trees with equal numbers of rows.

    Raises:
        ValueError: A tensor's batch dimension is not divisible by `n`.
    """
    if n < 1:
        raise ValueError(f"A batch is split in one part or more, not in {n}.")
    for path, tensor in _tensors("split", batch).items():
        size = tensor.shape[0] if tensor.ndim else None
        if size is None or size % n:
            raise ValueError(f"Cannot split {path!r} in {n}: its batch dimension is {size}, which {n} does not divide.")
    return [tree.map(lambda tensor, i=i: tensor.chunk(n)[i], batch) for i in range(n)]


def _tensors(action: str, batch: Tree) -> dict[str, Tensor]:
    """{path: tensor} of the batch; ValueError for a leaf that is no tensor. action: the verb in its message."""
    if tree.contains(batch, Documents):
        raise ValueError(
            f"Cannot {action} Documents, which count those of a whole batch: {action} the segment ids and positions, "
            "and call fnmodels.documents or prepare after."
        )
    found: dict[str, Any] = tree.flatten(batch)
    for path, leaf in found.items():
        if isinstance(leaf, Tensor):
            continue
        if is_block_mask(leaf):
            why = (
                "it is a BlockMask, which holds indices: do it to a fnmodels.inputs.Mask, and make the BlockMask after"
            )
        elif isinstance(leaf, Layout):
            why = "it is a Layout, which belongs to one batch in one order: leave it out, and make it anew after"
        else:
            why = f"it is a {type(leaf).__name__} and no tensor"
        raise ValueError(f"Cannot {action} {path!r}: {why}.")
    return found

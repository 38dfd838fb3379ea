"""The order of a sequence for context parallelism: which tokens each of `ranks` equal shares should hold.

A causal query sees as many keys as it is old, so contiguous shares leave the first rank idle. Everything here is one
permutation of the sequence, made once at the data boundary and applied by `fnmodels.permute` to the whole batch; since
masks, rotary tables and labels follow from tensors that were permuted with it, nothing downstream need know.

    batch, back = balance(batch, mask, ranks=4)  # rank r computes columns r S/4 .. (r+1) S/4
    logits = fnmodels.permute(logits, back)      # in the order of the text again
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch
from torch import Tensor

from .batch import permute
from .mask import Mask
from .tree import Tree


def balance(
    batch: Tree, mask: Mask, ranks: int, *, method: Literal["mask", "head_tail"] = "mask", block: int = 128
) -> tuple[Tree, Tensor]:
    """(the batch in an order that loads `ranks` equal shares evenly, the order that undoes it).

    batch: any tree of [B, S, ...] tensors (tokens, positions, segment ids, labels, rotary tables, masks as data).
    method: "mask" deals out blocks by what `mask` really lets each see, "head_tail" pairs the two ends of each row.
    """
    length = mask.q_positions.shape[1]
    orders = {
        "mask": lambda: balanced_order(mask, ranks, block=block),
        "head_tail": lambda: head_tail_order(length, ranks),
    }
    if method not in orders:
        raise ValueError(f'method is {method!r}: it is "mask" or "head_tail".')
    order = orders[method]()
    return permute(batch, order), inverse_order(order)


def head_tail_order(length: int, ranks: int) -> Tensor:
    """[S]: the sequence in 2 ranks equal pieces, rank r getting the r-th and the r-th from the end.

    Exact for one causal document per row; it knows nothing of documents or windows (see `balanced_order`).
    """
    if length % (2 * ranks):
        raise ValueError(f"head-tail order on {ranks} ranks needs a length divisible by {2 * ranks}, not {length}.")
    pieces = torch.arange(length).view(2 * ranks, -1)
    return torch.cat([torch.cat((pieces[r], pieces[2 * ranks - 1 - r])) for r in range(ranks)])


def balanced_order(mask: Mask, ranks: int, *, block: int = 128) -> Tensor:
    """[B, S]: per row, blocks of `block` queries dealt out so that the ranks see about the same number of keys.

    Largest block first to the least loaded rank with room (Graham's LPT rule, within 4/3 of the best without the room
    limit). Host-side; counts visible keys exactly, in memory linear in S.
    """
    area = visible_keys(mask).cpu()
    length = area.shape[1]
    if length % (ranks * block):
        raise ValueError(
            f"{ranks} ranks of whole blocks of {block} need a length divisible by {ranks * block}, not {length}."
        )
    room = length // block // ranks
    orders = []
    for row in area.view(area.shape[0], -1, block).sum(-1).tolist():
        shares: list[list[int]] = [[] for _ in range(ranks)]
        load = [0] * ranks
        for index in sorted(range(len(row)), key=lambda i: (-row[i], i)):
            rank = min((r for r in range(ranks) if len(shares[r]) < room), key=lambda r: (load[r], r))
            shares[rank].append(index)
            load[rank] += row[index]
        blocks = torch.tensor([index for share in shares for index in sorted(share)])
        orders.append((blocks[:, None] * block + torch.arange(block)).flatten())
    return torch.stack(orders).to(mask.q_positions.device)


def inverse_order(order: Tensor) -> Tensor:
    """The order that undoes `order`, [S] or [B, S]."""
    return order.argsort(dim=-1)


def visible_keys(mask: Mask, *, chunk: int = 256) -> Tensor:
    """int64 [B, Q]: how many keys each query sees. Memory is O(chunk K), time O(Q K)."""
    counts = []
    for begin in range(0, mask.q_positions.shape[1], chunk):
        part = slice(begin, begin + chunk)
        queries = dataclasses.replace(
            mask,
            q_positions=mask.q_positions[:, part],
            q_segments=mask.q_segments[:, part],
            q_spans=None if mask.q_spans is None else mask.q_spans[:, part],
        )
        counts.append(queries.dense()[:, 0].sum(-1))
    return torch.cat(counts, dim=1)


def imbalance(mask: Mask, ranks: int, order: Tensor | None = None) -> float:
    """The largest share of visible keys over the mean one, all rows together; 1 is perfect, `ranks` the worst."""
    area = visible_keys(mask)
    if order is not None:
        area = area.gather(1, order.expand(area.shape[0], -1))
    shares = area.sum(0).view(ranks, -1).sum(-1).double()
    return float(shares.max() / shares.mean()) if shares.sum() else 1.0

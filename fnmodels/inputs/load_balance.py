"""Load balancing for context parallelism: permutations of the sequence that give every rank equal attention work.

The number of keys that a causal query sees grows with its position, so contiguous shards leave the first rank idle. The
remedy is one permutation of the sequence, made once at the data boundary and applied by `fnmodels.permute` to the full
batch; masks, rotary tables and labels are computed from the permuted tensors, so nothing downstream needs to know.

    batch, back = balance(batch, mask, ranks=4)  # rank r computes indices r S/4 .. (r+1) S/4 of the sequence dimension
    logits = fnmodels.permute(logits, back)      # back in the order of the text
"""

from typing import Literal

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree

from .mask import Mask
from .transforms import permute


def balance(
    batch: Tree, mask: Mask, ranks: int, *, method: Literal["mask", "head_tail"] = "mask", block: int = 128
) -> tuple[Tree, Tensor]:
    """Permutes a batch so that equal contiguous shards of its positions have equal work (context parallelism).

    Args:
        batch: Any tree of [B, S, ...] tensors (tokens, positions, segment ids, labels, rotary tables, masks as data).
        mask: The mask that says which keys a query sees.
        ranks: The number of shards.
        method: "mask" distributes blocks by the number of keys that `mask` lets them see, "head_tail" pairs the two
            ends of each row.
        block: Positions that stay together.

    Returns:
        The permuted batch, and the order that undoes it, for `permute`.

    Raises:
        ValueError: The length is not divisible as the method needs, or `method` is another word.
    """
    _check_sizes(mask, ranks, block)
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
    """Order [S]: of 2 * ranks equal pieces of the sequence, rank r gets the r-th and the r-th from the end.

    Exact for one causal document per row; documents and windows are ignored (see `balanced_order`).
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}; it must be at least 1.")
    if length % (2 * ranks):
        raise ValueError(f"head-tail order on {ranks} ranks needs a length divisible by {2 * ranks}, not {length}.")
    pieces = torch.arange(length).view(2 * ranks, -1)
    return torch.cat([torch.cat((pieces[r], pieces[2 * ranks - 1 - r])) for r in range(ranks)])


def balanced_order(mask: Mask, ranks: int, *, block: int = 128) -> Tensor:
    """Order [B, S]: blocks of `block` queries are assigned per row so that all ranks see about the same number of keys.

    The block with most keys goes first, to the least loaded rank with room (Graham's LPT rule, within 4/3 of optimal
    without the room limit). Host-side; counts visible keys exactly (`visible_keys`).
    """
    _check_sizes(mask, ranks, block)
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


def _check_sizes(mask: Mask, ranks: int, block: int = 1) -> None:
    if not isinstance(mask, Mask):
        raise TypeError(f"Load balancing is computed on a fnmodels.inputs.Mask, not on a {type(mask).__name__}.")
    if ranks < 1 or block < 1:
        raise ValueError(f"ranks is {ranks} and block is {block}; both must be at least 1.")


def inverse_order(order: Tensor) -> Tensor:
    """The inverse permutation of `order`, [S] or [B, S]."""
    return order.argsort(dim=-1)


def visible_keys(mask: Mask) -> Tensor:
    """int64 [B, Q]: the number of keys that each query sees. Host-side; memory is linear in the sequence.

    Time is S log S for rules that bound what ranges of positions see (`Rule.visible`, `Rule.covers`), else quadratic in
    the longest document.
    """
    rows = max(tensor.shape[0] for tensor in tree.leaves(mask))
    counts = torch.zeros(rows, mask.q_positions.shape[1], dtype=torch.int64)
    for row in range(rows):
        one = tree.map(torch.Tensor.cpu, mask.select(slice(None), slice(None), slice(row, row + 1)))
        q, kv = _by_document(one.q_positions, one.q_segments), _by_document(one.kv_positions, one.kv_segments)
        counts[row, q] = _visible_in_row(one.select(q, kv))
    return counts.to(mask.q_positions.device)


_PIECE = (256, 1024)  # the most queries and keys for which the predicate is evaluated at once


def _visible_in_row(mask: Mask) -> Tensor:
    """[Q] of one sorted row: the (query, key) plane is bisected until a rectangle is empty, full or small."""
    q_positions, kv_positions = mask.q_positions[0].tolist(), mask.kv_positions[0].tolist()
    q_documents, kv_documents = _documents(mask.q_segments), _documents(mask.kv_segments)
    counts = torch.zeros(len(q_positions), dtype=torch.int64)
    waiting = [(*q_documents[d], *kv_documents[d]) for d in q_documents.keys() & kv_documents.keys() if d > 0]
    while waiting:
        q0, q1, k0, k1 = waiting.pop()
        queries, keys = (q_positions[q0], q_positions[q1 - 1]), (kv_positions[k0], kv_positions[k1 - 1])
        low, high = mask.rule.visible(queries)
        if keys[1] < low or keys[0] > high:
            continue
        if mask.rule.covers(queries, keys):
            counts[q0:q1] += k1 - k0
        elif q1 - q0 <= _PIECE[0] and k1 - k0 <= _PIECE[1]:
            counts[q0:q1] += mask.select(slice(q0, q1), slice(k0, k1)).dense()[0, 0].sum(-1)
        elif (k1 - k0) * _PIECE[0] >= (q1 - q0) * _PIECE[1]:
            middle = (k0 + k1) // 2
            waiting += [(q0, q1, k0, middle), (q0, q1, middle, k1)]
        else:
            middle = (q0 + q1) // 2
            waiting += [(q0, middle, k0, k1), (middle, q1, k0, k1)]
    return counts


def _by_document(positions: Tensor, segments: Tensor) -> Tensor:
    """The order [S] that sorts tokens by document, then by position; from [1, S]."""
    order = positions[0].argsort(stable=True)
    return order[segments[0, order].argsort(stable=True)]


def _documents(segments: Tensor) -> dict[int, tuple[int, int]]:
    """{segment: [start, stop)} of sorted segment ids [1, S]."""
    ids, sizes = segments[0].unique_consecutive(return_counts=True)
    stops = sizes.cumsum(0)
    return dict(zip(ids.tolist(), zip((stops - sizes).tolist(), stops.tolist(), strict=True), strict=True))


def imbalance(mask: Mask, ranks: int, order: Tensor | None = None) -> float:
    """The ratio of the largest to the mean work of contiguous shards.

    Args:
        mask: The mask that says which keys a query sees.
        ranks: The number of shards.
        order: A permutation of the positions, [S] or [B, S], for a mask of as many rows or of a single row; None: as
            they are.

    Returns:
        max / mean over ranks of visible keys, summed over rows: 1 is perfect balance, `ranks` the worst.

    Raises:
        ValueError: The shards are not of equal length, or the order is of another shape.
    """
    _check_sizes(mask, ranks)
    area = visible_keys(mask)
    if area.shape[1] % ranks:
        raise ValueError(f"{ranks} equal shares need a length divisible by {ranks}, not {area.shape[1]}.")
    if order is not None:
        order = order if order.ndim == 2 else order[None]
        rows = max(len(area), len(order))
        if order.shape[1] != area.shape[1] or {len(area), len(order)} - {1, rows}:
            raise ValueError(f"The order is {list(order.shape)}, and the mask has {list(area.shape)} queries.")
        area = area.expand(rows, -1).gather(1, order.expand(rows, -1))
    shares = area.sum(0).view(ranks, -1).sum(-1).cpu().double()
    return float(shares.max() / shares.mean()) if shares.sum() else 1.0

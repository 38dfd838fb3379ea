"""Moving tokens to their experts and back, as two functions and the values that pass between them.

    rows, sent = dispatch(x, indices, valid, experts)     # [T, D] -> [T k, D], sorted by expert
    y = combine(rows, sent, weights)                      # [T k, D] -> [T, D]

Shapes depend on shapes only. Expert parallelism does the same with a message in between; ranks that do not divide the
tokens take `virtual_padding`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels import tree


@tree.pytree
@dataclass(frozen=True)
class Dispatched:
    """Where the rows came from.

    order: [T k] int64; row i is choice `order[i]` of the flattened [T, k]. counts: [E] int64, rows of each expert;
    padding's rows come after them and belong to none. valid: [T] bool.
    """

    order: Tensor
    counts: Tensor
    valid: Tensor


def dispatch(x: Tensor, indices: Tensor, valid: Tensor, experts: int) -> tuple[Tensor, Dispatched]:
    """(rows [T k, D] sorted by expert, those of one in the order of tokens, padding's last; what `combine` needs).

    x [T, D], indices [T, k] int64 below `experts`, valid [T] bool. What stands at padding is not looked at.
    """
    key = torch.where(valid[:, None], indices, experts).flatten()
    order = key.argsort(stable=True)
    counts = key.new_zeros(experts + 1).scatter_add(0, key, torch.ones_like(key))[:experts]
    rows = x.index_select(0, order // indices.shape[1]) if x.shape[0] else x
    return rows, Dispatched(order, counts, valid)


def combine(rows: Tensor, sent: Dispatched, weights: Tensor) -> Tensor:
    """[T, D]: each token's rows times its weights [T, k], added up; exactly 0 at padding, whatever its rows hold.

    Products are in the wider of the two dtypes, sums in fp32 at least, the result in the rows' dtype.
    """
    tokens, k = weights.shape
    if not tokens:
        return rows
    row = torch.arange(len(sent.order), device=rows.device)
    where = torch.empty_like(row).scatter(0, sent.order, row)
    slots = rows.index_select(0, where).unflatten(0, (tokens, k))
    valid = sent.valid[:, None]
    # 0 times NaN is NaN: the sum is cleared after it, and the weights before it, whose gradient is that NaN again.
    return (slots * weights.where(valid, 0)[..., None]).sum(1).where(valid, 0).to(rows.dtype)


def virtual_padding(tokens: int, ranks: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """(how many slots are missing to a multiple of `ranks`, the tokens lo <= t < hi that each rank owns).

    Every rank has the same number of slots; the last ones own fewer tokens than slots, or none. The missing slots hold
    nothing: they never reach an expert, a count or a loss.
    """
    if ranks < 1 or tokens < 0:
        raise ValueError(f"{tokens} tokens over {ranks} ranks: there must be one rank at least, and no negative count.")
    pad = -tokens % ranks
    slots = (tokens + pad) // ranks
    return pad, tuple((min(r * slots, tokens), min((r + 1) * slots, tokens)) for r in range(ranks))

"""MoE dispatch and combine: sorting tokens by expert, and the weighted sum of the experts' outputs.

    rows, dispatched = dispatch(x, indices, valid, experts)    # [T, D] -> [T k, D], sorted by expert
    y = combine(rows, dispatched, weights)                     # [T k, D] -> [T, D]

Output shapes depend on input shapes only. Expert parallelism adds an all-to-all in between; `virtual_padding` is for
numbers of tokens that are not divisible by the ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels import tree


@tree.pytree
@dataclass(frozen=True)
class Dispatched:
    """The origin of the sorted rows, from `dispatch` to `combine`.

    order: [T k] int64; row i is entry `order[i]` of the flattened [T, k]. counts: [E] int64, rows of each expert;
    the rows of padding come last and belong to no expert. valid: [T] bool.
    """

    order: Tensor
    counts: Tensor
    valid: Tensor


def dispatch(x: Tensor, indices: Tensor, valid: Tensor, experts: int) -> tuple[Tensor, Dispatched]:
    """(rows [T k, D] sorted by expert, then by token, those of padding last; what `combine` needs).

    x [T, D], indices [T, k] int64 below `experts`, valid [T] bool. Indices at padding are ignored.
    """
    key = torch.where(valid[:, None], indices, experts).flatten()
    order = key.argsort(stable=True)
    counts = key.new_zeros(experts + 1).scatter_add(0, key, torch.ones_like(key))[:experts]
    rows = x.index_select(0, order // indices.shape[1]) if x.shape[0] else x
    return rows, Dispatched(order, counts, valid)


def combine(rows: Tensor, dispatched: Dispatched, weights: Tensor) -> Tensor:
    """[T, D]: sum over k of each token's rows times its weights [T, k]; exactly 0 at padding, whatever its rows hold.

    Products are in the wider of the two dtypes, sums in fp32 at least, the result in the rows' dtype.
    """
    tokens, k = weights.shape
    if not tokens:
        return rows
    row = torch.arange(len(dispatched.order), device=rows.device)
    where = torch.empty_like(row).scatter(0, dispatched.order, row)
    slots = rows.index_select(0, where).unflatten(0, (tokens, k))
    valid = dispatched.valid[:, None]
    # 0 times NaN is NaN: zero the sum, and also the weights, through whose gradient the NaN would return.
    return (slots * weights.where(valid, 0)[..., None]).sum(1).where(valid, 0).to(rows.dtype)


def virtual_padding(tokens: int, ranks: int) -> tuple[int, tuple[tuple[int, int], ...]]:
    """(number of empty slots up to a multiple of `ranks`, the token range (lo, hi) that each rank owns).

    Every rank has the same number of slots; the last ranks own fewer tokens than slots, or none. Empty slots never
    reach an expert, a count or a loss.
    """
    if ranks < 1 or tokens < 0:
        raise ValueError(f"{tokens} tokens over {ranks} ranks: there must be one rank at least, and no negative count.")
    pad = -tokens % ranks
    slots = (tokens + pad) // ranks
    return pad, tuple((min(r * slots, tokens), min((r + 1) * slots, tokens)) for r in range(ranks))

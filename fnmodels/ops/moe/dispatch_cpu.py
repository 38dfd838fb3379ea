"""`dispatch` and `combine` where counts may be read on the host: eager mode on a CPU. First derivatives only.

    rows, packed = pack(x, indices, valid, experts)     # [T, D] -> [N, D], sorted by expert, without padding
    y = unpack(rows, packed, weights)                   # [N, D] -> [T, D]

What costs here is memory, not launches. The k rows of a token are weighted and added up as they are read, by torch's
embedding bag: for y, and for the gradient of x. The gradient of rows is made some rows at a time, which stay in cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.autograd_guard import FirstOrder

_AT_ONCE = 512  # rows of a gradient


@dataclass(frozen=True)
class Packed:
    """Where the rows came from.

    choice: [N] int64; row i is choice `choice[i]` of the flattened [T, k]. real: [N] bool, False for a copy that only
    makes up the number. place: [T, k] int64, the row of each choice, 0 at padding. padding: [P] int64, its tokens.
    counts: [E] int64, rows of each expert.
    """

    choice: Tensor
    real: Tensor
    place: Tensor
    padding: Tensor
    counts: Tensor


def pack(x: Tensor, indices: Tensor, valid: Tensor, experts: int, *, multiple: int = 1) -> tuple[Tensor, Packed]:
    """(rows [N, D] sorted by expert, those of one in the order of tokens; what `unpack` needs).

    x [T, D], indices [T, k] int64 below `experts`, valid [T] bool. What stands at padding is not looked at. multiple:
    each expert that has rows gets copies of its last one up to a multiple of this number; `unpack` leaves them out, so
    that they have no gradient.
    """
    key = torch.where(valid[:, None], indices, experts).flatten()
    order = key.argsort(stable=True)
    counts = key.new_zeros(experts + 1).scatter_add(0, key, torch.ones_like(key))[:experts]
    order = order[: int(counts.sum())]
    filled, ends = counts + -counts % multiple, counts.cumsum(0)
    later = filled.cumsum(0) - filled - (ends - counts)  # how far the copies before it move an expert's rows
    expert = torch.arange(experts, device=key.device).repeat_interleave(filled)
    row, last = torch.arange(len(expert), device=key.device) - later[expert], ends[expert] - 1
    place = torch.arange(len(order), device=key.device) + later[key[order]]
    packed = Packed(
        choice=order[row.minimum(last)],
        real=row <= last,
        place=torch.zeros_like(key).scatter(0, order, place).view(indices.shape),
        padding=valid.logical_not().nonzero().squeeze(1),
        counts=filled,
    )
    return _Pack.apply(x, packed.choice, packed.place, packed.padding), packed


def unpack(rows: Tensor, packed: Packed, weights: Tensor) -> Tensor:
    """[T, D]: each token's rows times its weights [T, k], added up; exactly 0 at padding, whatever the weights there.

    Sums are in fp32 at least and rounded once, to the rows' dtype.
    """
    return _Unpack.apply(rows, weights, packed.choice, packed.real, packed.place, packed.padding)


def _add_up(rows: Tensor, weights: Tensor | None, place: Tensor, padding: Tensor) -> Tensor:
    if not len(rows):
        return rows.new_zeros(len(place), rows.shape[1])
    if weights is not None and weights.dtype != rows.dtype:
        # A bag takes weights in the rows' dtype: what is lost of one is added as the weight of the same row once more.
        high = weights.to(rows.dtype)
        place, weights = torch.cat((place, place), 1), torch.cat((high, (weights - high).to(rows.dtype)), 1)
    return F.embedding_bag(place, rows, mode="sum", per_sample_weights=weights).index_fill_(0, padding, 0)


class _Pack(FirstOrder):
    @staticmethod
    def forward(x: Tensor, choice: Tensor, place: Tensor, padding: Tensor) -> Tensor:
        return x.index_select(0, choice // place.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        place, padding = ctx.saved_tensors
        return _add_up(slope, None, place, padding), None, None, None


class _Unpack(FirstOrder):
    @staticmethod
    def forward(rows: Tensor, weights: Tensor, choice: Tensor, real: Tensor, place: Tensor, padding: Tensor) -> Tensor:
        return _add_up(rows, weights, place, padding)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, choice, real, place, padding = ctx.saved_tensors
        nothing = (None, None, None, None)
        if not len(rows):
            return torch.zeros_like(rows), torch.zeros_like(weights), *nothing
        wide = torch.promote_types(torch.promote_types(rows.dtype, weights.dtype), torch.float32)
        token = choice // place.shape[1]
        share = weights.flatten()[choice].where(real, 0).to(wide)[:, None]
        to_rows, to_choices = [], []
        for tokens, given, factor in zip(*(t.split(_AT_ONCE) for t in (token, rows, share)), strict=True):
            d = slope.index_select(0, tokens).to(wide)
            to_rows.append((d * factor).to(rows.dtype))
            to_choices.append((d * given).sum(1))
        to_weights = torch.cat(to_choices)[place].index_fill_(0, padding, 0)
        return torch.cat(to_rows), to_weights.to(weights.dtype), *nothing

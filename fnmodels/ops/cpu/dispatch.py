"""`dispatch` and `combine` for eager mode on a CPU, where counts can be read on the host. First derivatives only.

    rows, dispatched = dispatch_cpu(x, indices, valid, experts)    # [T, D] -> [N, D], sorted by expert, no padding
    y = combine_cpu(rows, dispatched, weights)                     # [N, D] -> [T, D]

The cost here is memory traffic, not launches. torch's embedding bag weights and sums the k rows of a token as it reads
them, for y and for the gradient of x. The gradient of rows is computed in chunks of rows that stay in the cache.

Row: MoE step.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.autograd_guard import FirstOrder

_CHUNK = 512  # rows of the gradient computed at a time


@dataclass(frozen=True)
class DispatchedCpu:
    """The origin of the sorted rows, from `dispatch_cpu` to `combine_cpu`.

    choice: [N] int64; row i is entry `choice[i]` of the flattened [T, k]. real: [N] bool, False for copies that fill up
    a multiple. place: [T, k] int64, the row of each entry, 0 at padding. padding: [P] int64, indices of padding
    tokens. counts: [E] int64, rows of each expert, copies included.
    """

    choice: Tensor
    real: Tensor
    place: Tensor
    padding: Tensor
    counts: Tensor


def dispatch_cpu(
    x: Tensor, indices: Tensor, valid: Tensor, experts: int, *, multiple: int = 1
) -> tuple[Tensor, DispatchedCpu]:
    """(rows [N, D] sorted by expert, then by token; what `combine_cpu` needs).

    x [T, D], indices [T, k] int64 below `experts`, valid [T] bool. Indices at padding are ignored. multiple:
    the rows of each expert (if it has any) are filled up to a multiple of this with copies of the last one, which
    `combine_cpu` ignores, so that they have no gradient.
    """
    key = torch.where(valid[:, None], indices, experts).flatten()
    order = key.argsort(stable=True)
    counts = key.new_zeros(experts + 1).scatter_add(0, key, torch.ones_like(key))[:experts]
    order = order[: int(counts.sum())]
    filled, ends = counts + -counts % multiple, counts.cumsum(0)
    later = filled.cumsum(0) - filled - (ends - counts)  # shift of an expert's rows by the copies before it
    expert = torch.arange(experts, device=key.device).repeat_interleave(filled)
    row, last = torch.arange(len(expert), device=key.device) - later[expert], ends[expert] - 1
    place = torch.arange(len(order), device=key.device) + later[key[order]]
    dispatched = DispatchedCpu(
        choice=order[row.minimum(last)],
        real=row <= last,
        place=torch.zeros_like(key).scatter(0, order, place).view(indices.shape),
        padding=valid.logical_not().nonzero().squeeze(1),
        counts=filled,
    )
    return _Dispatch.apply(x, dispatched.choice, dispatched.place, dispatched.padding), dispatched


def combine_cpu(rows: Tensor, dispatched: DispatchedCpu, weights: Tensor) -> Tensor:
    """[T, D]: sum over k of each token's rows times its weights [T, k]; exactly 0 at padding, whatever the weights.

    Sums are taken in fp32 at least and rounded once, to the rows' dtype.
    """
    return _Combine.apply(rows, weights, dispatched.choice, dispatched.real, dispatched.place, dispatched.padding)


def _weighted_sum(rows: Tensor, weights: Tensor | None, place: Tensor, padding: Tensor) -> Tensor:
    if not len(rows):
        return rows.new_zeros(len(place), rows.shape[1])
    if weights is not None and weights.dtype != rows.dtype:
        # embedding_bag needs weights in the rows' dtype: each rounding error becomes a second weight of the same row.
        rounded = weights.to(rows.dtype)
        place, weights = torch.cat((place, place), 1), torch.cat((rounded, (weights - rounded).to(rows.dtype)), 1)
    return F.embedding_bag(place, rows, mode="sum", per_sample_weights=weights).index_fill_(0, padding, 0)


class _Dispatch(FirstOrder):
    @staticmethod
    def forward(x: Tensor, choice: Tensor, place: Tensor, padding: Tensor) -> Tensor:
        return x.index_select(0, choice // place.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[2:])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        place, padding = ctx.saved_tensors
        return _weighted_sum(grad_output, None, place, padding), None, None, None


class _Combine(FirstOrder):
    @staticmethod
    def forward(rows: Tensor, weights: Tensor, choice: Tensor, real: Tensor, place: Tensor, padding: Tensor) -> Tensor:
        return _weighted_sum(rows, weights, place, padding)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        rows, weights, choice, real, place, padding = ctx.saved_tensors
        no_grads = (None, None, None, None)
        if not len(rows):
            return torch.zeros_like(rows), torch.zeros_like(weights), *no_grads
        wide = torch.promote_types(torch.promote_types(rows.dtype, weights.dtype), torch.float32)
        token = choice // place.shape[1]
        share = weights.flatten()[choice].where(real, 0).to(wide)[:, None]
        grad_rows, grad_choices = [], []
        for tokens, chunk, factor in zip(*(t.split(_CHUNK) for t in (token, rows, share)), strict=True):
            d = grad_output.index_select(0, tokens).to(wide)
            grad_rows.append((d * factor).to(rows.dtype))
            grad_choices.append((d * chunk).sum(1))
        grad_weights = torch.cat(grad_choices)[place].index_fill_(0, padding, 0)
        return torch.cat(grad_rows), grad_weights.to(weights.dtype), *no_grads

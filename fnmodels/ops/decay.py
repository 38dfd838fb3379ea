"""Decays of a chunk's tokens, within each document and without subnormal numbers."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.cpu.blocks import Space


def earlier_of_document(run: Tensor) -> Tensor:
    """bool [B, C, C] of the runs [B, C] of a chunk's tokens: whether j is of i's document and not later."""
    earlier = torch.ones(run.shape[1], run.shape[1], dtype=torch.bool, device=run.device).tril()
    return (run[:, :, None] == run[:, None, :]) & earlier


def decay_in_document(g: Tensor, same: Tensor) -> Tensor:
    """The log decay of each token [B, C, ...] summed since its document or the chunk began, itself included.

    A product with zeros and ones, so that no bit depends on another document; in fp64, because differences of these
    sums are what counts. same: from `earlier_of_document`.
    """
    return (same.double() @ g.double().flatten(2)).view(g.shape)


class Decays(NamedTuple):
    """Those of all chunks of C tokens; the last tokens of the last chunk may mean nothing."""

    log: Tensor  # from `decay_in_document`, fp64 [chunks, B, H, C]
    since: Tensor  # decay since the chunk began, 0 where the state before it is of another document, as log
    until: Tensor  # decay until the chunk ends, 0 for tokens of documents that end before, as log
    bound: Tensor  # of the log decay of pairs [chunks, B, C, C]: 0, or for those that do not meet a negligible one


def decays(g: Tensor, run: Tensor, before: Tensor, chunk: int, dtype: torch.dtype) -> Decays:
    """g: log decays [B, S, H]. run, before: from `runs`, [B, S]. `since`, `until` and `bound` are in `dtype`."""
    # What fills the last chunk changes neither its last sum nor its last run.
    g = by_chunk(F.pad(g, (0, 0, 0, -g.shape[1] % chunk)), chunk)
    run, before = by_chunk(run, chunk), by_chunk(before, chunk)
    same = earlier_of_document(run.flatten(0, 1)).view(*run.shape, chunk)
    log = decay_in_document(g.flatten(0, 1), same.flatten(0, 1)).view(g.shape)
    since = decay_of(log.to(dtype)).where((run == before[..., :1])[..., None], 0)
    until = decay_of((log[..., -1:, :] - log).to(dtype)).where((run == run[..., -1:])[..., None], 0)
    bound = torch.where(same, 0.0, _least(dtype) - 1).to(dtype)
    log, since, until = (t.mT.contiguous() for t in (log, since, until))
    return Decays(log, since, until, bound)


def by_chunk(x: Tensor, chunk: int) -> Tensor:
    """[B, S, ...] -> [chunks, B, chunk, ...]; copies of the last token fill the last chunk."""
    if more := -x.shape[1] % chunk:
        x = torch.cat((x, x[:, -1:].expand(-1, more, *x.shape[2:])), 1)
    return x.unflatten(1, (-1, chunk)).transpose(0, 1)


def decay_between(log: Tensor, bound: Tensor, space: Space) -> Tensor:
    """`decay_of_pairs` [M, H, C, C] without gradients, of log decays [M, H, C] and bounds [M, C, C] of `Decays`."""
    shape = (*log.shape, log.shape[-1])
    apart = torch.sub(log[..., None], log[..., None, :], out=space("apart", *shape, dtype=log.dtype))
    # At least a number: exp takes several times as long on -inf.
    lowest = bound.new_full((), _least(bound.dtype) - 1)
    decay = space("decay", *shape).copy_(apart).clamp_(lowest, bound[:, None]).exp_()
    return torch.threshold_(decay, negligible(bound.dtype), 0)


def decay_of_pairs(cum: Tensor, same: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(cum_i - cum_j) [..., C, C] of log decays [..., C] in `dtype`; 0 where not `same` [..., C, C]."""
    return decay_of((cum[..., :, None] - cum[..., None, :]).to(dtype)).where(same, 0)


def decay_of(log: Tensor) -> Tensor:
    """exp(log), at most 1, and 0 where it is less than 1e-19 (fp32).

    Such factors change no result, but they or products of two are subnormal numbers, on which processors compute about
    a hundred times as long.
    """
    at_most_0 = log.masked_fill(log > 0, 0)  # the gradient of clamp at its limit is 1 or 0, by the release of torch
    return F.threshold(at_most_0, _least(log.dtype), -torch.inf).exp()


def negligible(dtype: torch.dtype) -> float:
    """The largest factor that is taken as 0."""
    return math.exp(_least(dtype))


def _least(dtype: torch.dtype) -> float:
    return 0.5 * math.log(torch.finfo(dtype).tiny)

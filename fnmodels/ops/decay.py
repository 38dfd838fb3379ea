"""Decays of a chunk's tokens, within each document and without subnormal numbers."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.dtypes import widest


def earlier_of_document(run: Tensor) -> Tensor:
    """bool [B, C, C] of the runs [B, C] of a chunk's tokens: whether j is of i's document and not later."""
    earlier = torch.ones(run.shape[1], run.shape[1], dtype=torch.bool, device=run.device).tril()
    return (run[:, :, None] == run[:, None, :]) & earlier


def decay_in_document(g: Tensor, same: Tensor) -> Tensor:
    """The log decay of each token [B, C, ...] summed since its document or the chunk began, itself included.

    A product with zeros and ones, so that no bit depends on another document; in fp64, because differences of these
    sums are what counts. same: from `earlier_of_document`.
    """
    dtype = widest(g.device)
    return (same.to(dtype) @ g.to(dtype).flatten(2)).view(g.shape)


def decay_of_pairs(cum: Tensor, same: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(cum_i - cum_j) [..., C, C] of log decays [..., C] in `dtype`; 0 where not `same` [..., C, C]."""
    return decay_of((cum[..., :, None] - cum[..., None, :]).to(dtype)).where(same, 0)


def decay_of(log: Tensor) -> Tensor:
    """exp(log), at most 1, and 0 where it is less than 1e-19 (fp32).

    Such factors change no result, but they or products of two are subnormal numbers, on which processors compute about
    a hundred times as long.
    """
    at_most_0 = log.masked_fill(log > 0, 0)  # the gradient of clamp at its limit is 1 or 0, by the release of torch
    return F.threshold(at_most_0, least_log(log.dtype), -torch.inf).exp()


def negligible(dtype: torch.dtype) -> float:
    """The largest factor that is taken as 0."""
    return math.exp(least_log(dtype))


def least_log(dtype: torch.dtype) -> float:
    """The log of `negligible`."""
    return 0.5 * math.log(torch.finfo(dtype).tiny)

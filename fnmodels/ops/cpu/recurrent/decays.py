"""The decays of all chunks of a row without gradients, for steps by hand; `ops.decay` has the definitions.

Row: recurrent step.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.cpu.blocks import Space
from fnmodels.ops.decay import decay_in_document, decay_of, earlier_of_document, least_log, negligible


class Decays(NamedTuple):
    """Decays of all chunks of C tokens; the last tokens of the last chunk may mean nothing."""

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
    bound = torch.where(same, 0.0, least_log(dtype) - 1).to(dtype)
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
    lowest = bound.new_full((), least_log(bound.dtype) - 1)
    decay = space("decay", *shape).copy_(apart).clamp_(lowest, bound[:, None]).exp_()
    return torch.threshold_(decay, negligible(bound.dtype), 0)

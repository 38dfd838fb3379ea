"""A chunk of the recurrence of Mamba 2 and, by hand, its gradient; `ssd` has the maths.

Sizes: R rows, C tokens of the chunk, H heads of width P, G groups of h heads, N numbers of state per channel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fnmodels.ops.norm import upcast

from .chunks import ByHand
from .decay import decay_in_document, decay_of, decay_of_pairs, earlier_of_document


class _Parts(NamedTuple):
    """A chunk's inputs in fp32, decays and products; G groups of h heads, [R, G, C, h P] where heads share a group."""

    x: Tensor  # [R, C, H, P]
    scaled: Tensor  # dt x, as x
    B: Tensor  # [R, G, C, N]
    C: Tensor
    same: Tensor  # [R, C, C]
    since: Tensor  # decay since the chunk began, 0 where the state is of another document, [R, C, H, 1]
    until: Tensor  # decay until the chunk ends, 0 for tokens of documents that end before, [R, C, H, 1]
    decay: Tensor  # of pairs [R, G, h, C, C]
    pairs: Tensor  # [R, H, C, C]
    read: Tensor  # [R, C, H, P]


def _parts(state: Tensor, along: tuple[Tensor, ...], A: Tensor) -> _Parts:
    x, dt, B, C, run, before = along
    groups, wide = B.shape[2], upcast(x)
    B, C = (upcast(t).transpose(1, 2) for t in (B, C))
    same = earlier_of_document(run)
    cum = decay_in_document(dt * A, same)  # [R, C, H]
    since = decay_of(cum.to(wide.dtype)).where((run == before[:, :1])[..., None], 0)[..., None]
    until = decay_of((cum[:, -1:] - cum).to(wide.dtype)).where((run == run[:, -1:])[..., None], 0)[..., None]
    cum = cum.transpose(1, 2).unflatten(1, (groups, -1))
    decay = decay_of_pairs(cum, same[:, None, None], wide.dtype)
    pairs = ((C @ B.transpose(-1, -2))[:, :, None] * decay).flatten(1, 2)
    read = of_heads(C @ of_groups(state, groups).transpose(-1, -2), x.shape[3]) * since
    return _Parts(wide, wide * dt[..., None], B, C, same, since, until, decay, pairs, read)


def of_groups(state: Tensor, groups: int) -> Tensor:
    """[R, H, P, N] -> [R, G, h P, N]."""
    return state.unflatten(1, (groups, -1)).flatten(2, 3)


def of_heads(x: Tensor, width: int) -> Tensor:
    """[R, G, C, h P] -> [R, C, H, P]."""
    return x.transpose(1, 2).flatten(2).unflatten(2, (-1, width))


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[R, C, H, P] -> [R, G, C, h P]."""
    return x.flatten(2).unflatten(2, (groups, -1)).transpose(1, 2)


def by_hand() -> ByHand:
    """A chunk and its gradient without autograd."""
    return ByHand(_chunk_in_place, _chunk_gradient, "ssd", [])


def chunk(state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    A, D = constants
    c = _parts(state, along, A)
    y = (c.pairs @ c.scaled.transpose(1, 2)).transpose(1, 2) + c.read + D[:, None] * c.x
    added = _by_group(c.scaled * c.until, c.B.shape[1]).transpose(-1, -2) @ c.B
    return y, c.since[:, -1, :, :, None] * state + added.view(state.shape)


def _chunk_in_place(state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...], after: Tensor) -> Tensor:
    """`chunk` without gradients; the state after the chunk goes to `after`, which may be `state`."""
    A, D = constants
    c = _parts(state, along, A)
    y = (c.pairs @ c.scaled.transpose(1, 2)).transpose(1, 2).add_(c.read).addcmul_(D[:, None], c.x)
    torch.mul(state, c.since[:, -1, :, :, None], out=after)
    written = _by_group(c.scaled.mul_(c.until), c.B.shape[1]).transpose(-1, -2)
    of_groups(after, c.B.shape[1]).flatten(0, 1).baddbmm_(written.flatten(0, 1), c.B.flatten(0, 1))
    return y


def _chunk_gradient(
    state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...], grad_y: Tensor, grad_state: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of the state, x, dt, B, C, A and D of `chunk`."""
    (A, D), dt = constants, along[1]
    c = _parts(state, along, A)
    groups, width = c.B.shape[1], c.x.shape[3]
    d_y = grad_y.transpose(1, 2)  # [R, H, C, P]
    d_pairs = d_y @ c.scaled.permute(0, 2, 3, 1)
    d_products = (d_pairs.view(c.decay.shape) * c.decay).sum(2)  # [R, G, C, C]
    written, d_read = _by_group(c.scaled * c.until, groups), _by_group(grad_y * c.since, groups)
    old, new = of_groups(state, groups), of_groups(grad_state, groups)
    d_C = d_products @ c.B + d_read @ old
    d_B = d_products.transpose(-1, -2) @ c.C + written @ new
    d_written = of_heads(c.B @ new.transpose(-1, -2), width) * c.until
    d_scaled = (c.pairs.transpose(-1, -2) @ d_y).transpose(1, 2) + d_written
    decayed = c.since[:, -1, :, :, None] * grad_state
    d_state = decayed + (d_read.transpose(-1, -2) @ c.C).view(state.shape)
    # By the log decays: of pairs, of what was read, of what was written, and of the state itself.
    by_pair, ended = d_pairs * c.pairs, (d_written * c.scaled).sum(-1)
    d_cum = (by_pair.sum(-1) - by_pair.sum(-2)).transpose(1, 2) + (grad_y * c.read).sum(-1) - ended
    d_cum[:, -1] += ended.sum(1) + (decayed * state).sum((-1, -2))
    d_g = c.same.to(d_cum.dtype).transpose(1, 2) @ d_cum
    d_dt = d_g * A + (d_scaled * c.x).sum(-1)
    d_x = d_scaled * dt[..., None] + D[:, None] * grad_y
    d_A, d_D = (d_g * dt).sum((0, 1)), (grad_y * c.x).sum((0, 1, 3))
    return d_state, d_x, d_dt, d_B.transpose(1, 2), d_C.transpose(1, 2), None, None, d_A, d_D

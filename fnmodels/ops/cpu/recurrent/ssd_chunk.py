"""Chunks of the recurrence of Mamba 2 and their gradient, by hand; `ops.recurrent.ssd` has the maths.

Sizes: R rows, n chunks of C tokens, H heads of width P, G groups of h heads, N numbers of state per channel.

Row: Mamba 2 step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fnmodels.ops.cpu.blocks import Space
from fnmodels.ops.dtypes import upcast

from .chunks import ByHand, Given
from .decays import decay_between, decays


class _Parts(NamedTuple):
    """The inputs of chunks in fp32, decays and products, up to what depends on the state."""

    x: Tensor  # [R n, C, H, P]
    scaled: Tensor  # dt x, as x
    B: Tensor  # [R n, G, C, N]
    C: Tensor
    since: Tensor  # from `Decays`, [R n, C, H, 1]
    until: Tensor
    decay: Tensor  # of pairs [R n, H, C, C]
    pairs: Tensor  # of pairs, with C_i . B_j


def of_groups(state: Tensor, groups: int) -> Tensor:
    """[R, H, P, N] -> [R, G, h P, N]."""
    return state.unflatten(1, (groups, -1)).flatten(2, 3)


def of_heads(x: Tensor, width: int) -> Tensor:
    """[R, G, C, h P] -> [R, C, H, P]."""
    return x.transpose(1, 2).flatten(2).unflatten(2, (-1, width))


def by_group(x: Tensor, groups: int) -> Tensor:
    """[R, C, H, P] -> [R, G, C, h P]."""
    return x.flatten(2).unflatten(2, (groups, -1)).transpose(1, 2)


def by_hand() -> ByHand:
    """Chunks and their gradient without autograd."""
    return ByHand(_prepared, _step, _gradient, True, "ssd")


def _prepared(along: tuple[Tensor, ...], constants: tuple[Tensor, ...], chunk: int) -> tuple[Tensor, ...]:
    """`Decays`."""
    x, dt, _, _, run, before = along
    return decays(dt * constants[0], run, before, chunk, torch.promote_types(x.dtype, torch.float32))


def _parts(given: Given) -> _Parts:
    n, space = len(given.prepared[0]), given.space
    x, dt, B, C = (t.unflatten(1, (n, -1)).flatten(0, 1) for t in given.slices[:4])
    R, tokens, heads, _ = x.shape
    log, since, until, bound = (t.transpose(0, 1).flatten(0, 1)[..., :tokens] for t in given.prepared)
    wide = x if x.dtype == bound.dtype else space("x", *x.shape).copy_(x)
    scaled = torch.mul(wide, dt[..., None], out=space("scaled", *x.shape))
    B, C = (upcast(t).transpose(1, 2) for t in (B, C))
    decay = decay_between(log, bound[:, :tokens], space)
    pairs, products = space("pairs", R, heads, tokens, tokens), C @ B.transpose(-1, -2)
    torch.mul(_grouped(decay, B), products[:, :, None], out=_grouped(pairs, B))
    return _Parts(wide, scaled, B, C, since.mT[..., None], until.mT[..., None], decay, pairs)


def _grouped(x: Tensor, B: Tensor) -> Tensor:
    """[R, H, ...] -> [R, G, h, ...]."""
    return x.unflatten(1, (B.shape[1], -1))


def _read(c: _Parts, states: Tensor, space: Space) -> Tensor:
    """Reads [R n, C, H, P] by the tokens of the states [R n, H, P, N] before their chunks."""
    read = c.C @ of_groups(states, c.C.shape[1]).transpose(-1, -2)
    return torch.mul(of_heads(read, c.x.shape[3]), c.since, out=space("read", *c.x.shape))


def _step(state: Tensor, given: Given, after: Tensor, y: Tensor) -> None:
    n, D, c = len(after), given.constants[1], _parts(given)

    def write(states: Tensor) -> None:
        inside = (c.pairs @ c.scaled.transpose(1, 2)).transpose(1, 2)
        inside, read, x = (t.unflatten(0, (-1, n)) for t in (inside, _read(c, states, given.space), c.x))
        torch.add(inside, read, out=y.unflatten(1, (n, -1))).addcmul_(D[:, None], x)

    if n == 1:
        write(state)  # here, because the state after may be written over the one before
    written = c.scaled.mul_(c.until) if n == 1 else c.scaled * c.until
    written, B, ended = (t.unflatten(0, (-1, n)) for t in (by_group(written, c.B.shape[1]), c.B, c.since[:, -1]))
    befores = []
    for i in range(n):
        befores.append(state)
        state = torch.mul(state, ended[:, i, :, :, None], out=after[i])
        of_groups(state, B.shape[2]).flatten(0, 1).baddbmm_(written[:, i].mT.flatten(0, 1), B[:, i].flatten(0, 1))
    if n > 1:
        write(torch.stack(befores, 1).flatten(0, 1))


def _gradient(states: Tensor, given: Given, grad_y: Tensor, grad_state: Tensor, into: Sequence[Tensor | None]) -> None:
    """The gradients of x, dt, B, C, A and D in `into`, and of the first state in `grad_state`."""
    slices, (A, D), space, n = given.slices, given.constants, given.space, len(states)
    groups, width = slices[2].shape[2], slices[0].shape[3]
    c, old = _parts(given), states.transpose(0, 1).flatten(0, 1)
    dt, grad_y = (t.unflatten(1, (n, -1)).flatten(0, 1) for t in (slices[1], grad_y))
    read = torch.mul(_read(c, old, space), grad_y, out=space("of read", *c.x.shape)).sum(-1)
    # Backward along the sequence: the gradients of the states after each chunk.
    d_read, ended = by_group(grad_y * c.since, groups), c.since[:, -1, :, :, None]
    news = _gradients_of_states(grad_state, n, d_read, c.C, ended)
    d_y = grad_y.transpose(1, 2)  # [R n, H, C, P]
    d_pairs = d_y @ c.scaled.permute(0, 2, 3, 1)
    d_products = torch.mul(d_pairs, c.decay, out=c.decay).unflatten(1, (groups, -1)).sum(2)  # [R n, G, C, C]
    written, old_of, new_of = by_group(c.scaled * c.until, groups), of_groups(old, groups), of_groups(news, groups)
    d_C = d_products @ c.B + d_read @ old_of
    d_B = d_products.transpose(-1, -2) @ c.C + written @ new_of
    d_written = of_heads(c.B @ new_of.transpose(-1, -2), width).mul_(c.until)
    d_scaled = (c.pairs.transpose(-1, -2) @ d_y).transpose(1, 2).add_(d_written)
    # By the log decays: of pairs, of what was read, of what was written, and of the state itself.
    by_pair, of_written = d_pairs.mul_(c.pairs), d_written.mul_(c.scaled).sum(-1)
    d_cum = (by_pair.sum(-1) - by_pair.sum(-2)).transpose(1, 2) + read - of_written
    d_cum[:, -1] += of_written.sum(1) + (news * old).sum((-1, -2)) * ended[..., 0, 0]
    tokens = d_cum.shape[1]
    same = (given.prepared[-1].transpose(0, 1).flatten(0, 1)[:, :tokens, :tokens] == 0).to(d_cum.dtype)
    d_g = same.mT @ d_cum
    d_dt = d_g * A + torch.mul(d_scaled, c.x, out=space("of scaled", *c.x.shape)).sum(-1)
    d_A, d_D = (d_g * dt).sum((0, 1)), torch.mul(grad_y, c.x, out=space("of scaled", *c.x.shape)).sum((0, 1, 3))
    d_x = d_scaled.mul_(dt[..., None]).addcmul_(D[:, None], grad_y)
    for grad, value in zip(into, (d_x, d_dt, d_B.transpose(1, 2), d_C.transpose(1, 2)), strict=False):
        if grad is not None:
            grad.unflatten(1, (n, -1)).copy_(value.unflatten(0, (-1, n)))
    for grad, value in zip(into[6:], (d_A, d_D), strict=True):
        if grad is not None:
            grad += value


def _gradients_of_states(new: Tensor, n: int, d_read: Tensor, C: Tensor, ended: Tensor) -> Tensor:
    """Gradients [R n, H, P, N] of the states after n chunks; `new`, of the last, becomes that of the initial state."""
    after = []
    d_read, C, ended = (t.unflatten(0, (-1, n)) for t in (d_read, C, ended))
    for i in reversed(range(n)):
        after.append(new.clone())
        new.mul_(ended[:, i])
        of_groups(new, C.shape[2]).flatten(0, 1).baddbmm_(d_read[:, i].mT.flatten(0, 1), C[:, i].flatten(0, 1))
    return torch.stack(after[::-1], 1).flatten(0, 1) if n > 1 else after[0]

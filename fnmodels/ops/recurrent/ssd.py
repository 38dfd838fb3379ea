"""State space duality, the recurrence of Mamba 2 (arXiv 2405.21060).

A head's state h [P, N] decays by a factor that the token chooses, and the token adds to it:

    h <- exp(dt A) h + dt x B^T        A < 0 per head, dt > 0 per token and head
    y = h C + D x

Within a chunk this is a causal product of pairs of tokens, C_i . B_j times the decay between them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnmodels.inputs.order import runs
from fnmodels.ops.invariant import rows_are_invariant
from fnmodels.ops.norm import upcast

from .before import Before, before_of
from .by_token import by_token, ssd_token
from .scan import ByHand, Step, decay_in_document, decay_of, decay_of_pairs, earlier_of_document, scan


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    segment_ids: Tensor,
    state: Tensor | None = None,
    last: Tensor | None = None,
    *,
    chunk: int = 64,
    kernel: Any = "auto",
) -> tuple[Tensor, Tensor]:
    """(y [B, S, H, P], state [B, H, P, N]), both in fp32 or wider.

    x: [B, S, H, P]. dt: [B, S, H], after softplus and clamp. A, D: [H], A negative. B, C: [B, S, G, N], each group for
    H / G heads. segment_ids: [B or 1, S] int64. state, last: those of the tokens before these, and their last segment
    id [B]. chunk: tokens per step of the loop; it does not change the function. kernel: "math" for all transforms;
        one with an attribute `before` takes the state from other processes.
    """
    rows, S, heads, width = x.shape
    if heads % B.shape[2]:
        raise ValueError(f"{heads} heads are not a multiple of {B.shape[2]} groups.")
    if (before_here := before_of(kernel, state)) is not None:
        return _continued((x, dt, B, C), (A, D), segment_ids, before_here, chunk)
    dtype = torch.promote_types(x.dtype, torch.float32)
    if state is None:
        state, last = torch.zeros(rows, heads, width, B.shape[3], dtype=dtype, device=x.device), None
    if not S:
        return x.new_empty(x.shape, dtype=dtype), state
    segment_ids = segment_ids.expand(rows, S)
    run, before = runs(segment_ids, last)
    dt = upcast(dt).where((segment_ids > 0)[..., None], 0)  # neither decays nor writes
    along, constants = (x, dt, B, C, run, before), (upcast(A), upcast(D))
    if rows_are_invariant():
        return scan(by_token(ssd_token), state, along, constants, chunk=chunk, kernel=kernel)
    if S == 1:
        return _token(state, along, constants)
    step, by_hand = steps()
    return scan(step, state, along, constants, chunk=chunk, kernel=kernel, by_hand=by_hand, node=("ssd", []))


def steps() -> tuple[Step, ByHand]:
    """A step of a chunk, and the same by hand."""
    return _chunk, (_chunk_in_place, _chunk_gradient)


def _continued(
    along: tuple[Tensor, ...], constants: tuple[Tensor, Tensor], segment_ids: Tensor, before: Before, chunk: int
) -> tuple[Tensor, Tensor]:
    """`ssd` after the pieces of other processes: what the piece makes of zeros, and of the state before it."""
    (x, dt, B, C), (A, D) = along, constants
    y, own = ssd(x, dt, A, B, C, D, segment_ids, chunk=chunk, kernel=before.kernel)
    segments = segment_ids.expand(x.shape[:2])
    goes_on = (runs(segments, before.segment(segment_ids))[0] == 0)[..., None]  # the first tokens of a row
    decay = (upcast(dt) * upcast(A)).where(goes_on & (segments > 0)[..., None], 0)
    since = decay_of(decay.double().cumsum(1).to(y.dtype)).where(goes_on, 0)  # [R, S, H]
    transition = since[:, -1, :, None, None]
    state = before.state(transition, own.flatten(2)[:, :, None]).view(own.shape)
    read = upcast(C).transpose(1, 2) @ _of_groups(state, B.shape[2]).transpose(-1, -2)
    return y + _of_heads(read, x.shape[3]) * since[..., None], transition * state + own


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
    read = _of_heads(C @ _of_groups(state, groups).transpose(-1, -2), x.shape[3]) * since
    return _Parts(wide, wide * dt[..., None], B, C, same, since, until, decay, pairs, read)


def _of_groups(state: Tensor, groups: int) -> Tensor:
    """[R, H, P, N] -> [R, G, h P, N]."""
    return state.unflatten(1, (groups, -1)).flatten(2, 3)


def _of_heads(x: Tensor, width: int) -> Tensor:
    """[R, G, C, h P] -> [R, C, H, P]."""
    return x.transpose(1, 2).flatten(2).unflatten(2, (-1, width))


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[R, C, H, P] -> [R, G, C, h P]."""
    return x.flatten(2).unflatten(2, (groups, -1)).transpose(1, 2)


def _chunk(state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    A, D = constants
    c = _parts(state, along, A)
    y = (c.pairs @ c.scaled.transpose(1, 2)).transpose(1, 2) + c.read + D[:, None] * c.x
    added = _by_group(c.scaled * c.until, c.B.shape[1]).transpose(-1, -2) @ c.B
    return y, c.since[:, -1, :, :, None] * state + added.view(state.shape)


def _chunk_in_place(state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...], after: Tensor) -> Tensor:
    """`_chunk` without gradients; the state after the chunk goes to `after`, which may be `state`."""
    A, D = constants
    c = _parts(state, along, A)
    y = (c.pairs @ c.scaled.transpose(1, 2)).transpose(1, 2).add_(c.read).addcmul_(D[:, None], c.x)
    torch.mul(state, c.since[:, -1, :, :, None], out=after)
    written = _by_group(c.scaled.mul_(c.until), c.B.shape[1]).transpose(-1, -2)
    _of_groups(after, c.B.shape[1]).flatten(0, 1).baddbmm_(written.flatten(0, 1), c.B.flatten(0, 1))
    return y


def _chunk_gradient(
    state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...], grad_y: Tensor, grad_state: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of the state, x, dt, B, C, A and D of `_chunk`."""
    (A, D), dt = constants, along[1]
    c = _parts(state, along, A)
    groups, width = c.B.shape[1], c.x.shape[3]
    d_y = grad_y.transpose(1, 2)  # [R, H, C, P]
    d_pairs = d_y @ c.scaled.permute(0, 2, 3, 1)
    d_products = (d_pairs.view(c.decay.shape) * c.decay).sum(2)  # [R, G, C, C]
    written, d_read = _by_group(c.scaled * c.until, groups), _by_group(grad_y * c.since, groups)
    old, new = _of_groups(state, groups), _of_groups(grad_state, groups)
    d_C = d_products @ c.B + d_read @ old
    d_B = d_products.transpose(-1, -2) @ c.C + written @ new
    d_written = _of_heads(c.B @ new.transpose(-1, -2), width) * c.until
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


def _token(state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """One token by the definition."""
    x, dt, B, C, run, before = along
    A, D = constants
    x, dt = upcast(x[:, 0]), dt[:, 0]
    B, C = (upcast(t[:, 0]).repeat_interleave(x.shape[1] // t.shape[2], dim=1) for t in (B, C))  # [rows, H, N]
    state = (state * (dt * A).exp()[..., None, None]).where((run == before)[..., None, None], 0)
    state = state + (dt[..., None] * x)[..., None] * B[..., None, :]
    return ((state @ C[..., None])[..., 0] + D[:, None] * x)[:, None], state

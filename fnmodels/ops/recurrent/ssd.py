"""State space duality, the recurrence of Mamba 2 (arXiv 2405.21060).

A head's state h [P, N] decays by a factor that the token chooses, and the token adds to it:

    h <- exp(dt A) h + dt x B^T        A < 0 per head, dt > 0 per token and head
    y = h C + D x

Within a chunk this is a causal product of pairs of tokens, C_i . B_j times the decay between them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.order import runs
from fnmodels.ops.cpu.recurrent import ssd_chunk
from fnmodels.ops.cpu.recurrent.scan import Output, scan
from fnmodels.ops.cpu.recurrent.ssd_chunk import by_group, of_groups, of_heads
from fnmodels.ops.decay import decay_in_document, decay_of, decay_of_pairs, earlier_of_document
from fnmodels.ops.dtypes import upcast, widest
from fnmodels.ops.invariant.by_token import by_token, ssd_token
from fnmodels.ops.invariant.rows import rows_are_invariant

from .before import Before, before_of


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
        return scan(by_token(ssd_token), state, along, constants, chunk=chunk, kernel=kernel, y=Output(0, dtype))
    if S == 1:
        return _token(state, along, constants)
    how: Any = {"chunk": chunk, "kernel": kernel, "by_hand": ssd_chunk.by_hand()}
    return scan(_chunk, state, along, constants, y=Output(0, dtype), **how)


def _continued(
    along: tuple[Tensor, ...], constants: tuple[Tensor, Tensor], segment_ids: Tensor, before: Before, chunk: int
) -> tuple[Tensor, Tensor]:
    """`ssd` after the pieces of other processes: what the piece makes of zeros, and of the state before it."""
    (x, dt, B, C), (A, D) = along, constants
    y, own = ssd(x, dt, A, B, C, D, segment_ids, chunk=chunk, kernel=before.kernel)
    segments = segment_ids.expand(x.shape[:2])
    goes_on = (runs(segments, before.segment(segment_ids))[0] == 0)[..., None]  # the first tokens of a row
    decay = (upcast(dt) * upcast(A)).where(goes_on & (segments > 0)[..., None], 0)
    since = decay_of(decay.to(widest(decay.device)).cumsum(1).to(y.dtype)).where(goes_on, 0)  # [R, S, H]
    transition = since[:, -1, :, None, None]
    state = before.state(transition, own.flatten(2)[:, :, None]).view(own.shape)
    read = upcast(C).transpose(1, 2) @ of_groups(state, B.shape[2]).transpose(-1, -2)
    return y + of_heads(read, x.shape[3]) * since[..., None], transition * state + own


def _chunk(state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """One chunk by torch's operations: (y [R, C, H, P], state)."""
    (x, dt, B, C, run, before), (A, D) = along, constants
    groups, x = B.shape[2], upcast(x)
    B, C = (upcast(t).transpose(1, 2) for t in (B, C))
    same = earlier_of_document(run)
    cum = decay_in_document(dt * A, same)  # [R, C, H]
    since = decay_of(cum.to(x.dtype)).where((run == before[:, :1])[..., None], 0)[..., None]
    until = decay_of((cum[:, -1:] - cum).to(x.dtype)).where((run == run[:, -1:])[..., None], 0)[..., None]
    decay = decay_of_pairs(cum.transpose(1, 2).unflatten(1, (groups, -1)), same[:, None, None], x.dtype)
    pairs, scaled = ((C @ B.transpose(-1, -2))[:, :, None] * decay).flatten(1, 2), x * dt[..., None]
    read = of_heads(C @ of_groups(state, groups).transpose(-1, -2), x.shape[3]) * since
    y = (pairs @ scaled.transpose(1, 2)).transpose(1, 2) + read + D[:, None] * x
    added = by_group(scaled * until, groups).transpose(-1, -2) @ B
    return y, since[:, -1, :, :, None] * state + added.view(state.shape)


def _token(state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """One token by the definition."""
    x, dt, B, C, run, before = along
    A, D = constants
    x, dt = upcast(x[:, 0]), dt[:, 0]
    B, C = (upcast(t[:, 0]).repeat_interleave(x.shape[1] // t.shape[2], dim=1) for t in (B, C))  # [rows, H, N]
    state = (state * (dt * A).exp()[..., None, None]).where((run == before)[..., None, None], 0)
    state = state + (dt[..., None] * x)[..., None] * B[..., None, :]
    return ((state @ C[..., None])[..., 0] + D[:, None] * x)[:, None], state

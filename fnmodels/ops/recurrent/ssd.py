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
from fnmodels.ops.norm import upcast

from .scan import decay_in_document, earlier_of_document, scan


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
    chunk: int = 128,
    kernel: Any = "auto",
) -> tuple[Tensor, Tensor]:
    """(y [B, S, H, P], state [B, H, P, N]), both in fp32 or wider.

    x: [B, S, H, P]. dt: [B, S, H], after softplus and clamp. A, D: [H], A negative. B, C: [B, S, G, N], each group for
    H / G heads. segment_ids: [B or 1, S] int64. state, last: those of the tokens before these, and their last segment
    id [B]. chunk: tokens per step of the loop; it does not change the function. kernel: "math" for all transforms.
    """
    rows, S, heads, width = x.shape
    if heads % B.shape[2]:
        raise ValueError(f"{heads} heads are not a multiple of {B.shape[2]} groups.")
    dtype = torch.promote_types(x.dtype, torch.float32)
    if state is None:
        state, last = torch.zeros(rows, heads, width, B.shape[3], dtype=dtype, device=x.device), None
    if not S:
        return x.new_empty(x.shape, dtype=dtype), state
    segment_ids = segment_ids.expand(rows, S)
    run, before = runs(segment_ids, last)
    dt = upcast(dt).where((segment_ids > 0)[..., None], 0)  # neither decays nor writes
    step = _token if S == 1 else _chunk
    return scan(step, state, (x, dt, B, C, run, before), (upcast(A), upcast(D)), chunk=chunk, kernel=kernel)


def _chunk(state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    x, dt, B, C, run, before = along
    A, D = constants
    groups = B.shape[2]
    wide = upcast(x)
    B, C = (upcast(t).transpose(1, 2) for t in (B, C))  # [rows, G, C, N]
    same = earlier_of_document(run)
    cum = decay_in_document(dt * A, same).transpose(1, 2).unflatten(1, (groups, -1))  # [rows, G, heads of a group, C]
    scaled = wide * dt[..., None]
    decay = (cum[..., :, None] - cum[..., None, :]).to(wide.dtype).clamp(max=0).exp().where(same[:, None, None], 0)
    pairs = ((C @ B.transpose(-1, -2))[:, :, None] * decay).flatten(1, 2)  # [rows, H, C, C]
    y = (pairs @ scaled.transpose(1, 2)).transpose(1, 2)
    # Decay since the chunk began, 0 where the state is of another document; until it ends, 0 for earlier documents.
    since = cum.to(wide.dtype).exp().where((run == before[:, :1])[:, None, None], 0)
    until = (cum[..., -1:] - cum).to(wide.dtype).clamp(max=0).exp().where((run == run[:, -1:])[:, None, None], 0)
    grouped = state.unflatten(1, (groups, -1))  # [rows, G, heads of a group, P, N]
    read = (C @ grouped.flatten(2, 3).transpose(-1, -2)).unflatten(-1, grouped.shape[2:4])  # [rows, G, C, heads, P]
    read = (read * since.transpose(-1, -2)[..., None]).transpose(1, 2).flatten(2, 3)
    until = until.flatten(1, 2).transpose(1, 2)[..., None]  # [rows, C, H, 1]
    written = (scaled * until).unflatten(2, (groups, -1)).flatten(3).transpose(1, 2)  # [rows, G, C, heads P]
    added = (written.transpose(-1, -2) @ B).view_as(grouped)
    state = (since[..., -1, None, None] * grouped + added).flatten(1, 2)
    return y + read + D[:, None] * wide, state


def _token(state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """One token by the definition."""
    x, dt, B, C, run, before = along
    A, D = constants
    x, dt = upcast(x[:, 0]), dt[:, 0]
    B, C = (upcast(t[:, 0]).repeat_interleave(x.shape[1] // t.shape[2], dim=1) for t in (B, C))  # [rows, H, N]
    state = (state * (dt * A).exp()[..., None, None]).where((run == before)[..., None, None], 0)
    state = state + (dt[..., None] * x)[..., None] * B[..., None, :]
    return ((state @ C[..., None])[..., 0] + D[:, None] * x)[:, None], state

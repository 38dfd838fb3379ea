"""The selective scan, the recurrence of Mamba 1 (arXiv 2312.00752).

A channel's state h [N] decays by factors that the token chooses, one for each of its N elements, and the token adds to
it:

    h <- exp(dt A) h + dt x B        A [N] < 0 per channel, dt > 0 per token and channel
    y = C . h + D x

Within a chunk the states are found by doubling (Hillis and Steele, 1986): pairs of a factor and a summand, of runs of
1, 2, 4, ... tokens, each combined with the run before it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.order import runs
from fnmodels.ops.cpu.recurrent.scan import Output, scan
from fnmodels.ops.decay import decay_of, negligible
from fnmodels.ops.dtypes import upcast, widest
from fnmodels.ops.invariant.by_token import by_token
from fnmodels.ops.invariant.rows import elementwise, pairwise_sum, rows_are_invariant

from .before import Before, before_of

_LONGEST = 32  # tokens of a chunk


def selective_scan(
    x: Tensor,
    dt: Tensor,
    B: Tensor,
    C: Tensor,
    A: Tensor,
    D: Tensor,
    segment_ids: Tensor,
    state: Tensor | None = None,
    last: Tensor | None = None,
    *,
    chunk: int = _LONGEST,
    kernel: Any = "auto",
) -> tuple[Tensor, Tensor]:
    """The recurrence along each document of a row.

    Args:
        x: [R, S, I], the channels.
        dt: [R, S, I], after softplus.
        B: [R, S, N], what the state takes in; one for all channels.
        C: [R, S, N], what y reads.
        A: [I, N], negative.
        D: [I].
        segment_ids: [R or 1, S] int64; 0 or less is padding, which neither decays nor writes.
        state: [R, I, N], that of the tokens before these; None: zeros.
        last: [R], the segment id of the last token before these.
        chunk: tokens per step of the loop; it does not change the function.
        kernel: "math" for all transforms; one with an attribute `before` takes the state from other processes.

    Returns:
        (y [R, S, I], state [R, I, N]), both in fp32 or wider.
    """
    if (before_here := before_of(kernel, state)) is not None:
        return _continued((x, dt, B, C), (A, D), segment_ids, before_here, chunk)
    rows, S, width = x.shape
    dtype = torch.promote_types(x.dtype, torch.float32)
    if state is None:
        state, last = torch.zeros(rows, width, B.shape[-1], dtype=dtype, device=x.device), None
    if not S:
        return x.new_empty(x.shape, dtype=dtype), state
    chunk = min(chunk, _LONGEST) if torch.compiler.is_exporting() else chunk
    segment_ids = segment_ids.expand(rows, S)
    run, before = runs(segment_ids, last)
    dt = upcast(dt).where((segment_ids > 0)[..., None], 0)
    along, constants = (x, dt, B, C, run, before), (upcast(A), upcast(D))
    step = by_token(_token) if rows_are_invariant() else _token if S == 1 else _chunk
    return scan(step, state, along, constants, chunk=chunk, kernel=kernel, y=Output(0, dtype))


def _chunk(state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """A chunk of at most `chunk` tokens: (y [R, C, I], state)."""
    (x, dt, B, C, run, before), (A, D) = along, constants
    x = upcast(x)
    goes_on = (run == before)[..., None, None]
    decay = decay_of(dt[..., None] * A).where(goes_on, 0)  # [R, C, I, N]
    added = (dt * x)[..., None] * upcast(B)[:, :, None]
    if torch.compiler.is_exporting():
        states = _of_any_length(state, added, decay)
        return (states * upcast(C)[:, :, None]).sum(-1) + D * x, states[:, -1]
    added = torch.cat((added[:, :1] + decay[:, :1] * state[:, None], added[:, 1:]), dim=1)
    span = 1
    while span < x.shape[1]:
        added = torch.cat((added[:, :span], added[:, span:] + decay[:, span:] * added[:, :-span]), dim=1)
        products = F.threshold(decay[:, span:] * decay[:, :-span], negligible(decay.dtype), 0.0)
        decay = torch.cat((decay[:, :span], products), dim=1)
        span *= 2
    return (added * upcast(C)[:, :, None]).sum(-1) + D * x, added[:, -1]


def _of_any_length(state: Tensor, added: Tensor, decay: Tensor) -> Tensor:
    """The states after each of up to _LONGEST tokens, by steps that do not depend on their number, for exported graphs.

    Runs before the first token add nothing, and their factor is 1.
    """
    length, span = added.shape[1], 1
    while span < _LONGEST:
        nothing = torch.zeros_like(added[:, :1]).expand(-1, span, -1, -1)
        added = added + decay * torch.cat((nothing, added), dim=1)[:, :length]
        decay = decay * torch.cat((nothing + 1, decay), dim=1)[:, :length]
        decay = F.threshold(decay, negligible(decay.dtype), 0.0)
        span *= 2
    return added + decay * state[:, None]


def _token(state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """One token by the definition, with sums in an order of their own."""
    x, dt, B, C, run, before = along
    A, D = constants
    x, dt, B, C = upcast(x[:, 0]), dt[:, 0], upcast(B[:, 0])[:, None], upcast(C[:, 0])[:, None]
    state = (state * elementwise(torch.exp, dt[..., None] * A)).where((run == before)[..., None], 0)
    state = state + (dt * x)[..., None] * B
    return (pairwise_sum(state * C, -1) + D * x)[:, None], state


def _continued(
    along: tuple[Tensor, ...], constants: tuple[Tensor, Tensor], segment_ids: Tensor, before: Before, chunk: int
) -> tuple[Tensor, Tensor]:
    """`selective_scan` after the pieces of other processes: what the piece makes of zeros, and of the state before."""
    (x, dt, B, C), (A, D) = along, constants
    y, own = selective_scan(x, dt, B, C, A, D, segment_ids, chunk=chunk, kernel=before.kernel)
    segments = segment_ids.expand(x.shape[:2])
    goes_on = (runs(segments, before.segment(segment_ids))[0] == 0)[..., None]  # the first tokens of a row
    steps = upcast(dt).where(goes_on & (segments > 0)[..., None], 0).to(widest(dt.device)).cumsum(1)
    since = (steps[..., None] * A).exp().to(y.dtype).where(goes_on[..., None], 0)  # [R, S, I, N]
    transition = since[:, -1]
    state = before.state(transition.flatten(1)[..., None, None], own.flatten(1)[..., None, None]).view(own.shape)
    return y + (since * state[:, None] * upcast(C)[:, :, None]).sum(-1), transition * state + own

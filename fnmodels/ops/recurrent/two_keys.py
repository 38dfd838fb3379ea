"""The rule of RWKV-7 (arXiv 2503.14456): a state that is read along one key and written along two others.

A head's state S [dk, dv] is a linear map from keys to values. Each token reads what S returns for the key `a`, lets
every key channel decay, and then writes that reading along the key `b` and its own value along the key `k`:

    u = S^T a
    S <- exp(g) S + b u^T + k v^T        -1 <= g <= 0 per key channel
    o = S^T r

With a = -kappa and b = kappa * rate, for a key kappa of length 1, a part of what S holds along kappa is removed.

A chunk of C tokens is one triangular system of C equations per head, whose unknowns are the readings u of its tokens.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.order import runs
from fnmodels.ops.cpu.recurrent.scan import Output, scan
from fnmodels.ops.decay import decay_in_document, decay_of, earlier_of_document
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.by_token import by_token, two_keys_token
from fnmodels.ops.invariant.rows import rows_are_invariant

from .before import Before, before_of

_LONGEST = 64  # tokens of a chunk: then no exp(-g) of several tokens is above exp(64), which fp32 holds


def two_key_rule(
    r: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    a: Tensor,
    b: Tensor,
    segment_ids: Tensor,
    state: Tensor | None = None,
    last: Tensor | None = None,
    *,
    chunk: int = 32,
    kernel: Any = "auto",
) -> tuple[Tensor, Tensor]:
    """The recurrence along each document of a row.

    Args:
        r: [B, S, H, dk], the keys that outputs read.
        k: [B, S, H, dk], the keys of the values.
        v: [B, S, H, dv].
        g: [B, S, H, dk], log decays from -1 to 0.
        a: [B, S, H, dk], the keys that the state is read along before it decays.
        b: [B, S, H, dk], the keys that these readings are written along.
        segment_ids: [B or 1, S] int64; 0 or less is padding, which neither decays nor writes.
        state: [B, H, dk, dv], that of the tokens before these; None: zeros.
        last: [B], the segment id of the last token before these.
        chunk: Tokens per step of the loop, at most 64; it does not change the function.
        kernel: "math" for all transforms; one with an attribute `before` takes the state from other processes.

    Returns:
        (o [B, S, H, dv] in v's dtype, state [B, H, dk, dv] in fp32 or wider).
    """
    if (before_here := before_of(kernel, state)) is not None:
        return _continued((r, k, v, g, a, b), segment_ids, before_here, chunk)
    B, S, heads, width = v.shape
    dtype = torch.promote_types(v.dtype, torch.float32)
    if state is None:
        state, last = torch.zeros(B, heads, k.shape[3], width, dtype=dtype, device=v.device), None
    if not S:
        return v.new_empty(v.shape), state
    segment_ids = segment_ids.expand(B, S)
    run, before = runs(segment_ids, last)
    valid = (segment_ids > 0)[..., None, None]
    k, b, g = k.where(valid, 0), b.where(valid, 0), upcast(g).where(valid, 0)
    step = by_token(two_keys_token) if rows_are_invariant() else _token if S == 1 else _chunk
    along = (r, k, v, g, a, b, run, before)
    return scan(step, state, along, chunk=min(chunk, _LONGEST), kernel=kernel, y=Output(2, v.dtype))


def _continued(along: tuple[Tensor, ...], segment_ids: Tensor, before: Before, chunk: int) -> tuple[Tensor, Tensor]:
    """`two_key_rule` after the pieces of other processes.

    From the state [0 | 1], and values [v | 0], the rule makes what the piece writes itself and its linear map of states
    in one pass, and the same of each token's output.
    """
    r, k, v, g, a, b = along
    rule = functools.partial(two_key_rule, chunk=chunk, kernel=before.kernel)
    width, keys = v.shape[3], k.shape[3]
    last, wide = before.segment(segment_ids), upcast(v)
    identity = torch.eye(keys, dtype=wide.dtype, device=v.device)
    start = F.pad(identity, (width, 0)).expand(v.shape[0], v.shape[2], -1, -1)
    o, end = rule(r, k, F.pad(wide, (0, keys)), g, a, b, segment_ids, start, last)
    (o, read), (own, transition) = o.split((width, keys), -1), end.split((width, keys), -1)
    state = before.state(transition, own)
    o = o + (read.transpose(1, 2) @ state).transpose(1, 2)
    return o.to(v.dtype), transition @ state + own


def _chunk(state: Tensor, along: tuple[Tensor, ...], _: Any) -> tuple[Tensor, Tensor]:
    """A chunk of several tokens: (o [B, C, H, dv], state)."""
    r, k, v, g, a, b, run, before = along
    tokens, dtype = v.shape[1], v.dtype
    same = earlier_of_document(run)
    cum = decay_in_document(g, same).transpose(1, 2)  # [B, H, C, dk], itself included
    r, k, v, g, a, b = (upcast(t).transpose(1, 2) for t in (r, k, v, g, a, b))
    # Each key with the decay since its document or the chunk began: queries times it, of a before its own token, and
    # keys divided by it. The bound of g keeps the quotients within fp32.
    queries = torch.cat((a * (cum - g).to(a.dtype).exp(), r * cum.to(r.dtype).exp()), dim=2)  # [B, H, 2 C, dk]
    keys = torch.cat((b, k), dim=2)
    pairs = queries @ (keys * (-cum).to(k.dtype).exp().repeat(1, 1, 2, 1)).transpose(-1, -2)
    pairs = pairs.unflatten(2, (2, tokens)).unflatten(4, (2, tokens))  # [B, H, reads, C, writes, C]
    same = same[:, None]
    goes_on = (run == before[:, :1])[:, None, :, None]  # of the document of the state before the chunk
    read = (queries @ state).unflatten(2, (2, tokens)).where(goes_on[:, :, None], 0)
    system, written = (pairs[:, :, 0, :, i].where(same, 0).tril(-1) for i in range(2))
    # The inverse and a product: LAPACK's solver takes several times as long on all of the right-hand side.
    identity = torch.eye(tokens, dtype=system.dtype, device=v.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(-system, identity, upper=False, unitriangular=True)
    values = torch.cat((inverse @ (read[:, :, 0] + written @ v), v), dim=2)  # [B, H, 2 C, dv]: the readings, then v
    o = read[:, :, 1] + pairs[:, :, 1].where(same[..., None, :], 0).flatten(3) @ values
    until = decay_of((cum[:, :, -1:] - cum).to(k.dtype)).where((run == run[:, -1:])[:, None, :, None], 0)
    since = decay_of(cum[:, :, -1].to(k.dtype)).where((run[:, -1] == before[:, 0])[:, None, None], 0)
    state = since[..., None] * state + (keys * until.repeat(1, 1, 2, 1)).transpose(-1, -2) @ values
    return o.transpose(1, 2).to(dtype), state


def _token(state: Tensor, along: tuple[Tensor, ...], _: Any) -> tuple[Tensor, Tensor]:
    """One token by the definition."""
    *tensors, run, before = along
    dtype = tensors[2].dtype
    r, k, v, g, a, b = (upcast(t)[:, 0] for t in tensors)
    state = state.where((run == before)[..., None, None], 0)
    read = a[..., None, :] @ state  # [B, H, 1, dv]
    state = g.exp()[..., None] * state + b[..., None] * read + k[..., None] * v[..., None, :]
    return (r[..., None, :] @ state).transpose(1, 2).to(dtype), state

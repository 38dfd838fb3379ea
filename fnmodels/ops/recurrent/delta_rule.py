"""The gated delta rule: Gated DeltaNet (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692).

A head's state S [Hk, Hv] is a linear map from keys to values. Each token lets it decay, and then replaces a part `beta`
of what it returns for the token's key by the token's value:

    S <- exp(g) S        g <= 0: a number per head, or one per key channel
    S <- S + k (beta (v - S^T k))^T
    o = S^T q

A chunk of C tokens is one triangular system of C equations per head, whose unknowns are the corrections
beta (v - S^T k) of its tokens; the rest are matrix products.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.order import runs
from fnmodels.ops.cpu.recurrent import delta_per_head
from fnmodels.ops.cpu.recurrent.chunks import ChunkStep
from fnmodels.ops.cpu.recurrent.scan import Output, scan
from fnmodels.ops.decay import decay_in_document, decay_of, decay_of_pairs, earlier_of_document
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.by_token import by_token, delta_token
from fnmodels.ops.invariant.rows import rows_are_invariant

from .before import Before, before_of

_BLOCK = 8  # tokens whose decays per channel are taken pair by pair


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    segment_ids: Tensor,
    state: Tensor | None = None,
    last: Tensor | None = None,
    *,
    scale: float = 1.0,
    normalize: bool = False,
    chunk: int = 64,
    overwrite: bool = False,
    kernel: Any = "auto",
) -> tuple[Tensor, Tensor]:
    """(o [B, S, Hv, dv] in v's dtype, state [B, Hv, dk, dv] in fp32 or wider).

    q, k: [B, S, Hk, dk], each key head for Hv / Hk value heads. v: [B, S, Hv, dv].
    g: log decay, at most 0, [B, S, Hv] or, per key channel, [B, S, Hv, dk]. beta: [B, S, Hv], from 0 to 2.
    segment_ids: [B or 1, S] int64. state, last: those of the tokens before these, and their last segment id [B].
    normalize: divide q and k by sqrt(sum of squares + 1e-6) first. scale: of q.
    chunk: tokens per step of the loop; it does not change the function. overwrite: the caller does not read v again, so
        that o may be written into it where no gradient is needed. kernel: "math" for all transforms;
        one with an attribute `before` takes the state from other processes.
    """
    B, S, heads, width = v.shape
    if heads % k.shape[2]:
        raise ValueError(f"{heads} value heads are not a multiple of {k.shape[2]} key heads.")
    if (before_here := before_of(kernel, state)) is not None:
        rule = functools.partial(delta_rule, scale=scale, normalize=normalize, chunk=chunk, kernel=before_here.kernel)
        return _continued(q, k, v, g, beta, segment_ids, before_here, rule)
    dtype = torch.promote_types(v.dtype, torch.float32)
    if state is None:
        state, last = torch.zeros(B, heads, k.shape[3], width, dtype=dtype, device=v.device), None
    if not S:
        return v.new_empty(v.shape), state
    segment_ids = segment_ids.expand(B, S)
    run, before = runs(segment_ids, last)
    valid = (segment_ids > 0)[..., None]
    g = upcast(g).where(valid if g.ndim == 3 else valid[..., None], 0)
    beta = upcast(beta).where(valid, 0)
    along = (q, k, v, g, beta, run, before)
    if rows_are_invariant():
        step = by_token(functools.partial(delta_token, normalize=normalize, scale=scale))
        return scan(step, state, along, chunk=chunk, kernel=kernel, y=Output(2, v.dtype))
    if S == 1:
        return _token(state, along, (), normalize=normalize, scale=scale)
    step, y = _by_chunk(chunk, normalize, scale), Output(2, v.dtype, overwrite)
    by_hand = delta_per_head.by_hand(float(normalize), scale) if g.ndim == 3 else None
    return scan(step, state, along, chunk=chunk, kernel=kernel, y=y, by_hand=by_hand)


def _by_chunk(longest: int, normalize: bool, scale: float) -> ChunkStep:
    return functools.partial(_chunk, longest=longest, normalize=normalize, scale=scale)


def _continued(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, segment_ids: Tensor, before: Before, rule: Any
) -> tuple[Tensor, Tensor]:
    """`delta_rule` after the pieces of other processes. rule: it, with its options and the kernel of one piece.

    From the state [0 | 1], and values [v | 0], the rule makes what the piece writes itself and its linear map of states
    in one pass, and the same of each token's output.
    """
    heads, (width, keys) = v.shape[2], (v.shape[3], k.shape[3])
    last, wide = before.segment(segment_ids), upcast(v)
    identity = torch.eye(keys, dtype=wide.dtype, device=v.device)
    start = F.pad(identity, (width, 0)).expand(v.shape[0], heads, -1, -1)
    values = F.pad(wide, (0, keys))
    o, end = rule(q, k, values, g, beta, segment_ids, start, last)
    (o, read), (own, transition) = o.split((width, keys), -1), end.split((width, keys), -1)
    state = before.state(transition, own)
    o = o + (read.transpose(1, 2) @ state).transpose(1, 2)
    return o.to(v.dtype), transition @ state + own


def _per_head(x: Tensor, heads: int) -> Tensor:
    """[B, C, H, ...] -> fp32 [B, heads, C, ...], each of the H heads for heads / H following ones."""
    x = upcast(x).transpose(1, 2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _prepared(q: Tensor, k: Tensor, normalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    q, k = upcast(q), upcast(k)
    if normalize:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    return q * scale, k


def _chunk(
    state: Tensor, along: tuple[Tensor, ...], _: Any, *, normalize: bool, scale: float, longest: int
) -> tuple[Tensor, Tensor]:
    """At most `longest` tokens, with decays of both kinds."""
    q, k, v, g, beta, run, before = along
    heads, tokens, dtype = v.shape[2], v.shape[1], v.dtype
    same = earlier_of_document(run)
    cum = decay_in_document(g if g.ndim == 4 else g[..., None], same).transpose(1, 2)  # [B, H, C, dk or 1]
    q, k, v, beta = (_per_head(x, heads) for x in (*_prepared(q, k, normalize, scale), v, beta[..., None]))
    # The decay since the chunk began, 0 where the state is of another document; and until the chunk ends, 0 for tokens
    # of documents that end before.
    since = decay_of(cum.to(k.dtype)).where((run == before[:, :1])[:, None, :, None], 0)
    until = decay_of((cum[:, :, -1:] - cum).to(k.dtype)).where((run == run[:, -1:])[:, None, :, None], 0)
    same = same[:, None, None]
    both = torch.stack((k, q), dim=2)
    if g.ndim == 4:
        # compiled for any length, which the halves below need to be a number
        more = (0, 0, 0, longest - tokens if torch.compiler.is_compiling() else 0)
        products = _decayed_products(*(F.pad(t, more) if more[3] else t for t in (both, k, cum)))
        pairs = products[..., :tokens, :tokens].where(same, 0)
    else:
        decay = decay_of_pairs(cum[:, :, None, :, 0], same, k.dtype)
        pairs = (both.flatten(2, 3) @ k.transpose(-1, -2)).unflatten(2, (2, tokens)) * decay
    read = ((both * since[:, :, None]).flatten(2, 3) @ state).unflatten(2, (2, tokens))  # [B, H, 2, C, dv]
    system = beta * pairs[:, :, 0].tril(-1)
    # The inverse and a product: LAPACK's solver takes several times as long on all of the right-hand side.
    identity = torch.eye(tokens, dtype=system.dtype, device=v.device).expand_as(system)
    inverse = torch.linalg.solve_triangular(system, identity, upper=False, unitriangular=True)
    corrections = inverse @ (beta * (v - read[:, :, 0]))
    o = read[:, :, 1] + pairs[:, :, 1] @ corrections
    decayed, written = since[:, :, -1, :, None] * state, k * until
    state = decayed + written.transpose(-1, -2) @ corrections
    return o.transpose(1, 2).to(dtype), state


def _decayed_products(both: Tensor, k: Tensor, cum: Tensor) -> Tensor:
    """sum over c of both[.., i, c] k[.., j, c] exp(cum[.., i, c] - cum[.., j, c]) for j <= i: [..., 2, C, C].

    exp(cum_i) exp(-cum_j) would overflow where the decay is fast. Halves of the chunk are taken apart: between them
    exp(cum_i - m) and exp(m - cum_j) are both at most 1, with m the value at the border. Values above the diagonal, and
    of tokens of two documents, mean nothing.
    """
    C = k.shape[-2]
    if C <= _BLOCK:
        cum = (cum - cum[..., :1, :]).to(k.dtype)
        decay = decay_of(cum[..., :, None, :] - cum[..., None, :, :])
        return ((k[..., None, :, :] * decay)[..., None, :, :, :] * both[..., :, None, :]).sum(-1)
    if C % 2:
        more = (0, 0, 0, 1)
        last = torch.cat((cum, cum[..., -1:, :]), dim=-2)
        return _decayed_products(F.pad(both, more), F.pad(k, more), last)[..., :C, :C]
    half = C // 2
    border = cum[..., half - 1 : half, :]
    queries = both[..., half:, :] * decay_of((cum[..., half:, :] - border).to(k.dtype))[..., None, :, :]
    keys = k[..., :half, :] * decay_of((border - cum[..., :half, :]).to(k.dtype))
    across = queries @ keys[..., None, :, :].transpose(-1, -2)
    halves = [t.unflatten(-2, (2, half)) for t in (both, k, cum)]
    inside = _decayed_products(halves[0].transpose(-3, -4), *halves[1:])  # [..., 2 halves, 2, half, half]
    first, second = inside.unbind(-4)
    return torch.cat((F.pad(first, (0, half)), torch.cat((across, second), dim=-1)), dim=-2)


def _token(state: Tensor, along: tuple[Tensor, ...], _: Any, *, normalize: bool, scale: float) -> tuple[Tensor, Tensor]:
    """One token by the definition."""
    q, k, v, g, beta, run, before = along
    heads, dtype = v.shape[2], v.dtype
    q, k = _prepared(q, k, normalize, scale)
    q, k, v, g, beta = (_per_head(x, heads)[:, :, 0] for x in (q, k, v, g, beta))
    decay = (g if g.ndim == 3 else g[..., None]).exp()[..., None]  # [B, H, dk or 1, 1]
    state = (state * decay).where((run == before)[..., None, None], 0)
    correction = beta[..., None] * (v - (k[..., None, :] @ state)[..., 0, :])
    state = state + k[..., None] * correction[..., None, :]
    return (q[..., None, :] @ state).transpose(1, 2).to(dtype), state

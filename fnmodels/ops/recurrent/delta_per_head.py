"""A chunk of the gated delta rule with a decay per head, and its gradient, by hand; `delta_rule` has the maths.

Factors of tokens (norms of queries and keys, decays, strengths) multiply products of pairs [C, C], which are smaller
than the tokens' vectors, so that queries and keys are read as they lie in memory: they are not normalized, scaled,
transposed or, in fp32, copied.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.norm import upcast

from .chunks import ByHand
from .decay import decay_in_document, decay_of, decay_of_pairs, earlier_of_document, negligible

# The arguments along the sequence: q, k, v, g, beta, run, before.
Along = tuple[Tensor, ...]


class _Solved(NamedTuple):
    """A chunk of C tokens up to its corrections; q^ = q norm_q and k^ = k norm_k are what the rule multiplies."""

    q: Tensor  # [N, C, dk] for N = B H
    k: Tensor
    norm_q: Tensor  # scale, over the length of q if it is normalized, [N, C, 1]
    norm_k: Tensor
    beta: Tensor  # [N, C, 1]
    since: Tensor  # decay since the chunk began, 0 where the state is of another document, [N, C, 1]
    until: Tensor  # decay until the chunk ends, 0 for tokens of documents that end before, [N, C, 1]
    decay: Tensor  # of pairs, 0 where they do not meet, [N, C, C]
    keys: Tensor  # k^_i k^_j decay_ij
    queries: Tensor  # q^_i k^_j decay_ij
    inverse: Tensor  # of the system of corrections, [N, C, C]
    errors: Tensor  # v - S^T k^ since, [N, C, dv]
    corrections: Tensor  # [N, C, dv]


def _by_head(x: Tensor, heads: int) -> Tensor:
    """[B, C, H, D] -> [B heads, C, D] in fp32 or wider; a view if it can be."""
    x = upcast(x).transpose(1, 2)
    return (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)).flatten(0, 1)


def _column(x: Tensor) -> Tensor:
    """[B, C, H] -> [B H, C, 1]."""
    return x.transpose(1, 2).flatten(0, 1)[..., None]


def _norm(x: Tensor, normalize: bool, scale: float) -> Tensor:
    if not normalize:
        return x.new_full((*x.shape[:-1], 1), scale)
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    return squares.add_(1e-6).rsqrt_().mul_(scale)


def _solved(state: Tensor, along: Along, normalize: bool, scale: float) -> _Solved:
    q, k, v, g, beta, run, before = along
    heads = v.shape[2]
    q, k, v = (_by_head(x, heads) for x in (q, k, v))
    same = earlier_of_document(run)
    cum = decay_in_document(g, same)
    since = _column(decay_of(cum.to(k.dtype)).where((run == before[:, :1])[..., None], 0))
    until = _column(decay_of((cum[:, -1:] - cum).to(k.dtype)).where((run == run[:, -1:])[..., None], 0))
    cum = cum.transpose(1, 2)
    decay = decay_of_pairs(cum, same[:, None], k.dtype)
    norm_q, norm_k, decay = _norm(q, normalize, scale), _norm(k, normalize, 1.0), decay.flatten(0, 1)
    beta, across = _column(upcast(beta)), k.transpose(1, 2)
    paired = decay * norm_k.transpose(1, 2)
    keys, queries = (torch.bmm(x, across).mul_(paired).mul_(norm) for x, norm in ((k, norm_k), (q, norm_q)))
    identity = torch.eye(k.shape[1], dtype=k.dtype, device=k.device).expand_as(keys)
    # The solver does not read the diagonal of the system and the elements above it; it makes columns, here of the
    # transposed inverse, because all else reads rows.
    columns = torch.linalg.solve_triangular((keys * beta).mT, identity, upper=True, unitriangular=True)
    # Sums of products of decays from j to i: without this, subnormal where those are long.
    inverse = F.hardshrink(columns.mT, negligible(k.dtype))
    errors = torch.addcmul(v, torch.bmm(k, state), norm_k * since, value=-1)
    corrections = torch.bmm(inverse * beta.transpose(1, 2), errors)
    return _Solved(q, k, norm_q, norm_k, beta, since, until, decay, keys, queries, inverse, errors, corrections)


def by_hand(normalize: float, scale: float) -> ByHand:
    """A chunk and its gradient; normalize: 0 or 1, whether queries and keys are divided by their lengths."""
    options: Any = {"normalize": bool(normalize), "scale": scale}
    step, gradient = functools.partial(_chunk, **options), functools.partial(_gradient, **options)
    return ByHand(step, gradient, "delta_per_head", [normalize, scale])


def _chunk(state: Tensor, along: Along, _: Any, after: Tensor, *, normalize: bool, scale: float) -> Tensor:
    """o [B, C, H, dv] without gradients; the state after the chunk goes to `after`, which may be `state`."""
    flat = state.flatten(0, 1)
    c = _solved(flat, along, normalize, scale)
    o = torch.bmm(c.q, flat).mul_(c.norm_q * c.since).baddbmm_(c.queries, c.corrections)
    torch.mul(flat, c.since[:, -1:], out=after.flatten(0, 1))
    after.flatten(0, 1).baddbmm_(c.k.transpose(1, 2), c.corrections.mul_(c.norm_k * c.until))
    return o.unflatten(0, state.shape[:2]).transpose(1, 2).to(along[2].dtype)


def _gradient(
    state: Tensor, along: Along, _: Any, grad_o: Tensor, grad_state: Tensor, *, normalize: bool, scale: float
) -> tuple[Tensor | None, ...]:
    """The gradients of the state, q, k, v, g and beta of `_chunk`."""
    old, new = state.flatten(0, 1), grad_state.flatten(0, 1)
    c, d_o = _solved(old, along, normalize, scale), _by_head(grad_o, state.shape[1])
    u, read_k, read_q = c.corrections, c.norm_k * c.since, c.norm_q * c.since
    d_u = (c.k @ new).mul_(c.norm_k * c.until)
    ended = (d_u * u).sum(-1)
    d_u.baddbmm_(c.queries.transpose(1, 2), d_o)
    d_right = c.inverse.transpose(1, 2) @ d_u  # of beta errors
    d_keys = (d_right @ u.transpose(1, 2)).neg_().tril_(-1)  # times beta: of `keys`
    d_queries = d_o @ u.transpose(1, 2)
    by_key, by_query = d_keys * c.keys, d_queries * c.queries
    d_beta = (d_right * c.errors).sum(-1) + by_key.sum(-1)
    d_v = d_right.mul_(c.beta)
    from_k, from_q = d_v @ old.transpose(1, 2), d_o @ old.transpose(1, 2)
    of_k, of_q = (from_k * c.k).sum(-1), (from_q * c.q).sum(-1)
    d_k, d_q = from_k.mul_(-c.since), from_q.mul_(c.since)
    d_k.addcmul_(u @ new.transpose(1, 2), c.until)
    # By the log decays: of pairs, of what was read, of what was written, and of the state itself.
    by_pair = by_key.mul_(c.beta).add_(by_query)
    d_cum = by_pair.sum(-1) - by_pair.sum(-2) + of_q * read_q[..., 0] - of_k * read_k[..., 0] - ended
    decayed = new * c.since[:, -1:]
    d_cum[:, -1] += ended.sum(-1) + (decayed * old).sum((-1, -2))
    same = earlier_of_document(along[5]).to(d_cum.dtype)
    d_g = same.transpose(1, 2) @ _tokens(d_cum, state)
    d_state = decayed.baddbmm_(c.k.transpose(1, 2), d_v * -read_k).baddbmm_(c.q.transpose(1, 2), d_o * read_q)
    # By the products of pairs.
    d_queries.mul_(c.decay)
    d_keys.mul_(c.decay).mul_(c.beta)
    d_q.baddbmm_(d_queries * c.norm_k.transpose(1, 2), c.k)
    d_k.baddbmm_(d_queries.transpose(1, 2) * c.norm_q.transpose(1, 2), c.q)
    d_k.baddbmm_((d_keys + d_keys.transpose(1, 2)).mul_(c.norm_k.transpose(1, 2)), c.k)
    d_q, d_k = _unnormalized(d_q, c.q, c.norm_q, normalize, scale), _unnormalized(d_k, c.k, c.norm_k, normalize, 1.0)
    d_q, d_k = _tokens(d_q, state), _tokens(d_k, state)
    if (heads := along[1].shape[2]) != state.shape[1]:
        d_q, d_k = (x.unflatten(2, (heads, -1)).sum(3) for x in (d_q, d_k))
    return d_state.view(state.shape), d_q, d_k, _tokens(d_v, state), d_g, _tokens(d_beta, state)


def _tokens(x: Tensor, state: Tensor) -> Tensor:
    """[B H, C, ...] -> [B, C, H, ...]."""
    return x.unflatten(0, state.shape[:2]).transpose(1, 2)


def _unnormalized(d_y: Tensor, x: Tensor, norm: Tensor, normalize: bool, scale: float) -> Tensor:
    """The gradient of x, where y = x norm; in place of d_y."""
    if normalize:
        along = (d_y * x).sum(-1, keepdim=True)
        d_y.addcmul_(x, along * norm.square() / -(scale**2))
    return d_y.mul_(norm)

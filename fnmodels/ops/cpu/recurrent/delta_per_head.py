"""Chunks of the gated delta rule with a decay per head, and their gradient, by hand; `delta_rule` has the maths.

Factors of tokens (lengths of queries and keys, decays, strengths) multiply rows of products, so that queries and keys
are read as they lie in memory: they are not normalized, scaled, transposed or, in fp32, copied. With n and m the
factors that normalize keys and queries, c = n^2 beta, s and t the decays since the chunk began and until it ends, D
those of pairs of tokens, and * by rows or by element:

    e = v - n s * (k S)                          errors: the values less what the state returns for the keys
    w = (1 + c * (k k^T * D below the diagonal))^-1 (n beta * e)        n times the corrections
    o = m * (s * (q S) + (q k^T * D) w)
    S <- s_last S + k^T (t * w)

Row: recurrent step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnmodels.ops.cpu.blocks import Space
from fnmodels.ops.decay import negligible
from fnmodels.ops.dtypes import upcast

from .chunks import ByHand, Given
from .decays import by_chunk, decay_between, decays


class _Chunks(NamedTuple):
    """n chunks of C tokens in B rows of H heads, as M = n B H matrices, up to what depends on the state."""

    q: Tensor  # [M, C, dk]
    k: Tensor
    v: Tensor  # [M, C, dv]
    m: Tensor  # [M, C, 1], as the following seven
    n: Tensor
    strength: Tensor  # n beta
    weight: Tensor  # c
    read: Tensor  # n s
    since: Tensor  # s
    until: Tensor  # t
    decay: Tensor  # D, [M, C, C], as the following three
    keys: Tensor  # k k^T * D
    queries: Tensor  # q k^T * D
    inverse: Tensor  # of the system, 1 + c * keys below the diagonal


class _Options(NamedTuple):
    normalize: float  # 0 or 1: whether queries and keys are divided by their lengths
    scale: float  # of queries


def by_hand(normalize: float, scale: float) -> ByHand:
    """Chunks and their gradient."""
    options = _Options(normalize, scale)
    step, gradient = functools.partial(_step, options), functools.partial(_gradient, options)
    return ByHand(_prepared, step, gradient, True, "delta_per_head", options)


def _prepared(along: tuple[Tensor, ...], _: Any, chunk: int) -> tuple[Tensor, ...]:
    """beta [chunks, B, H, C] and `Decays`."""
    v, g, beta, run, before = along[2:]
    wide = torch.promote_types(v.dtype, torch.float32)
    return by_chunk(upcast(beta), chunk).mT.contiguous(), *decays(g, run, before, chunk, wide)


def _chunks(given: Given, options: _Options) -> _Chunks:
    beta, *rest = given.prepared
    space = given.space
    n, _, heads, longest = beta.shape
    log, since, until, bound = rest
    q, k, v = (_matrices(x, n, heads, space, name) for x, name in zip(given.slices, "qkv", strict=False))
    M, C, _ = k.shape
    if longest > C:
        beta, log, since, until, bound = (*(t[..., :C] for t in (beta, log, since, until)), bound[..., :C, :C])
    beta, since, until = (x.reshape(M, C, 1) for x in (beta, since, until))
    decay = decay_between(log.flatten(0, 1), bound.flatten(0, 1), space).flatten(0, 1)
    m, norm = (_norm(x, space(name, M, C, 1), options.normalize) for x, name in ((q, "m"), (k, "n")))
    m.mul_(options.scale)
    across, strength = k.mT, norm * beta
    weight = strength * norm
    keys = torch.bmm(k, across, out=space("keys", M, C, C)).mul_(decay)
    queries = torch.bmm(q, across, out=space("queries", M, C, C)).mul_(decay)
    system = torch.mul(keys, weight, out=space("system", M, C, C))
    identity, columns = torch.eye(C, dtype=k.dtype, device=k.device).expand(M, C, C), space("columns", M, C, C)
    # The solver does not read the diagonal of the system and the elements above it; it makes columns, here of the
    # transposed inverse, because all else reads rows.
    torch.linalg.solve_triangular(system.mT, identity, upper=True, unitriangular=True, out=columns)
    # Sums of products of decays from j to i: without this, subnormal where those are long.
    inverse = torch.ops.aten.hardshrink.out(columns.mT, negligible(k.dtype), out=system)
    return _Chunks(q, k, v, m, norm, strength, weight, norm * since, since, until, decay, keys, queries, inverse)


def _matrices(x: Tensor, n: int, heads: int, space: Space, name: str) -> Tensor:
    """[B, n C, H, D] -> [n B heads, C, D] in fp32 or wider, each of the H heads for heads / H following ones.

    A view of x if that can be.
    """
    B, tokens, H, D = x.shape
    if (view := _view(x, n, heads)) is not None:
        return view
    copy = space(name, n * B * heads, tokens // n, D)
    copy.view(n, B, H, heads // H, tokens // n, D).copy_(_by_head(x, n)[:, :, :, None])
    return copy


def _view(x: Tensor, n: int, heads: int) -> Tensor | None:
    """[B, n C, heads, D] as [n B heads, C, D], where that needs no copy."""
    plain = n * len(x) == 1 and x.shape[2] == heads and x.dtype == torch.promote_types(x.dtype, torch.float32)
    return x[0].transpose(0, 1) if plain else None


def _by_head(x: Tensor, n: int) -> Tensor:
    """[B, n C, H, D] -> [n, B, H, C, D]."""
    return x.unflatten(1, (n, -1)).permute(1, 0, 3, 2, 4)


def _each(x: Tensor, n: int) -> tuple[Tensor, ...]:
    """[n B H, ...] of each of n chunks."""
    return (x,) if n == 1 else x.unflatten(0, (n, -1)).unbind()


def _norm(x: Tensor, out: Tensor, normalize: float) -> Tensor:
    if not normalize:
        return out.fill_(1)
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=out).square_().add_(1e-6).rsqrt_()


def _errors(k: Tensor, v: Tensor, read: Tensor, state: Tensor, out: Tensor) -> Tensor:
    """e of chunks, whose states before them are `state`."""
    return torch.addcmul(v, torch.bmm(k, state, out=out), read, value=-1, out=out)


def _step(options: _Options, state: Tensor, given: Given, after: Tensor, y: Tensor) -> None:
    n, space, c = len(after), given.space, _chunks(given, options)
    errors, w = (space(name, *c.v.shape) for name in ("errors", "w"))
    now, befores = state.flatten(0, 1), []
    parts = (c.k, c.v, c.inverse, c.strength, c.read, c.since[:, -1:], c.until, errors, w)
    each = zip(*(_each(t, n) for t in parts), after, strict=True)
    for k, v, inverse, strength, read, ended, until, scratch, written, new in each:
        torch.bmm(inverse, _errors(k, v, read, now, scratch).mul_(strength), out=written)
        befores.append(now)
        if n == 1:
            _write_output(c, now, w, errors, y)  # here, because the state after may be written over the one before
        now = torch.mul(now, ended, out=new.view(now.shape)).baddbmm_(k.mT, torch.mul(written, until, out=scratch))
    if n > 1:
        _write_output(c, torch.cat(befores), w, errors, y)


def _write_output(c: _Chunks, states: Tensor, w: Tensor, out: Tensor, y: Tensor) -> None:
    """y [B, n C, H, dv]; `out` is written over."""
    _write(y, torch.bmm(c.q, states, out=out).mul_(c.since).baddbmm_(c.queries, w), c.m)


def _write(y: Tensor, x: Tensor, factor: Tensor) -> None:
    """x * factor of matrices [n B H, C, D] in y [B, n C, H, D]."""
    n = len(x) // (len(y) * y.shape[2])
    if (view := _view(y, n, y.shape[2])) is not None:
        torch.mul(x, factor, out=view)
    else:
        into = _by_head(y, n)
        into.copy_(x.mul_(factor).view(into.shape))


def _gradient(
    options: _Options, states: Tensor, given: Given, grad_y: Tensor, grad_state: Tensor, into: Sequence[Tensor | None]
) -> None:
    """The gradients of q, k, v, g and beta in `into`, and of the first state in `grad_state`."""
    n, (B, H) = len(states), states.shape[1:3]
    space, c, old, new = (
        given.space,
        _chunks(given, options),
        states.flatten(0, 2),
        grad_state.view(-1, *grad_state.shape[2:]),
    )
    wide, tall, square = c.v.shape, c.k.shape, c.decay.shape
    errors, w, d_w, d_r, d_a, written = (space(x, *wide) for x in ("errors", "w", "d_w", "d_r", "d_a", "written"))
    grads = [None if t is None else _view(t, n, H) for t in into[:3]]
    d_q, d_k, d_v = (space(f"d_{x}", *shape) for x, shape in (("q", tall), ("k", tall), ("v", wide)))
    d_v = d_v if grads[2] is None else grads[2]
    _errors(c.k, c.v, c.read, old, errors)
    torch.bmm(c.inverse, torch.mul(errors, c.strength, out=d_w), out=w)
    of_y = _by_head(grad_y, n)
    torch.mul(of_y, c.m.view(*of_y.shape[:-1], 1), out=d_a.view(of_y.shape))
    torch.bmm(c.queries.mT, d_a, out=d_w)
    # Backward along the sequence: what depends on the gradient of the state after each chunk.
    ended, news = c.since[:, -1:], new if n == 1 else space("news", *old.shape)
    parts = (c.q, c.k, c.inverse, c.strength, c.read, c.since, c.until, ended, d_a, d_w, d_r, d_v, written, news)
    for q, k, inverse, strength, read, since, until, end, of_a, of_w, of_r, of_v, by_state, kept in reversed(
        list(zip(*(_each(t, n) for t in parts), strict=True))
    ):
        of_w += torch.bmm(k, new, out=by_state).mul_(until)
        torch.mul(torch.bmm(inverse.mT, of_w, out=of_r), strength, out=of_v)
        if n > 1:
            kept.copy_(new)
            _to_state_before(new, end, (q, of_a, since), (k, of_v, read), space)
    # Of pairs of tokens; d_keys without its sign.
    by_end = written.mul_(w).sum(-1)
    d_keys = torch.bmm(d_r, w.mT, out=space("d_keys", *square)).tril_(-1)
    d_queries = torch.bmm(d_a, w.mT, out=space("d_queries", *square))
    by_key, by_query = c.keys.mul_(d_keys), c.queries.mul_(d_queries)
    of_pairs, of_read = by_key.sum(-1), by_query.sum(-1)
    by_query.addcmul_(by_key, c.weight, value=-1)
    d_cum = by_query.sum(-1).sub_(by_query.sum(-2)).sub_(by_end)
    # Of what the state returned.
    scratch = space("scratch", *tall)
    torch.bmm(d_a, old.mT, out=d_q)
    torch.bmm(d_v, old.mT, out=d_k)
    of_q, of_k = torch.mul(d_q, c.q, out=scratch).sum(-1), torch.mul(d_k, c.k, out=scratch).sum(-1)
    of_q.mul_(c.since[..., 0])
    d_cum.add_(of_q).addcmul_(of_k, c.read[..., 0], value=-1)
    last = torch.mul(news, old, out=space("states", *old.shape)).sum((-1, -2))
    d_cum[:, -1] += by_end.sum(-1).addcmul_(last, ended[:, 0, 0])
    d_strength, norm = errors.mul_(d_r).sum(-1), c.n[..., 0]
    # Of queries and keys; first by products, then by the factors that normalize them.
    d_q.mul_(c.since).baddbmm_(d_queries.mul_(c.decay), c.k)
    d_k.mul_(c.read).addcmul_(torch.bmm(w, news.mT, out=scratch), c.until, value=-1)
    d_k.baddbmm_(d_queries.mT, c.q, beta=-1)
    d_keys.mul_(c.decay).mul_(c.weight)
    d_k.baddbmm_(torch.add(d_keys, d_keys.mT, out=c.keys), c.k, alpha=-1)
    by_q = by_k = None
    if options.normalize:
        by_q = of_q.add_(of_read).mul_(-1 / options.scale**2)[..., None] * c.m.square()
        of_n = (2 * c.weight[..., 0] * of_pairs).addcmul_(of_k, c.read[..., 0])
        by_k = of_n.addcmul_(d_strength, c.strength[..., 0], value=-1).mul_(norm.square())[..., None]
    _give(into[0], n, d_q, grads[0], c.q, by_q)
    _give(into[1], n, d_k, grads[1], c.k, by_k)
    if grads[2] is None:
        _give(into[2], n, d_v, None)
    if into[3] is not None:
        same = (given.prepared[-1][..., : tall[1], : tall[1]] == 0).to(d_cum.dtype)  # [n, B, C, C]
        _by_head(into[3][..., None], n).copy_((d_cum.view(n, B, H, -1) @ same)[..., None])
    if into[4] is not None:
        d_beta = d_strength.addcmul_(norm, of_pairs, value=-1).mul_(norm)
        _by_head(into[4][..., None], n).copy_(d_beta.view(n, B, H, -1, 1))
    if n == 1:
        _to_state_before(new, ended, (c.q, d_a, c.since), (c.k, d_v, c.read), space)


def _to_state_before(
    new: Tensor, ended: Tensor, asked: tuple[Tensor, ...], corrected: tuple[Tensor, ...], space: Space
) -> None:
    """The gradient `new` of the state after one chunk becomes that of the state before it.

    asked, corrected: queries and keys, the gradients of what they returned, and factors of these.
    """
    (q, of_q, by_q), (k, of_k, by_k) = asked, corrected
    new.mul_(ended).baddbmm_(k.mT, torch.mul(of_k, by_k, out=space("scaled", *of_k.shape)), alpha=-1)
    new.baddbmm_(q.mT, torch.mul(of_q, by_q, out=space("scaled", *of_q.shape)))


def _give(
    into: Tensor | None, n: int, x: Tensor, view: Tensor | None, more: Tensor | None = None, by: Tensor | None = None
) -> None:
    """x + more by of matrices in `into` [B, n C, heads, D], for fewer heads their sums. view: `into` as matrices."""
    if into is None:
        return
    if more is not None and by is not None:
        x = torch.addcmul(x, more, by, out=x if view is None else view)
    elif view is not None:
        view.copy_(x)
    if view is None:
        by_head = _by_head(into, n)
        x = x.view(*by_head.shape[:3], -1, *by_head.shape[3:])
        by_head.copy_(x.squeeze(3) if x.shape[3] == 1 else x.sum(3))

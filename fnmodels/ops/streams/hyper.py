"""Hyper-connections: a residual stream of n rows, from which each sublayer reads a mixture (arXiv 2409.19606).

With streams x [B, S, n, D] and a sublayer f:

    pre, post, comb = maps of x             [B, S, n], [B, S, n], [B, S, n, n], computed from each token's n D numbers
    y_k = post_k f(sum_j pre_j x_j) + sum_j comb_jk x_j

In manifold-constrained hyper-connections (arXiv 2512.24880; DeepSeek V4) comb is made doubly stochastic by Sinkhorn's
iterations, so that the streams neither grow nor vanish over many layers. In Hy4 there is no comb: each stream stays as
it is. A stack begins with n equal streams and ends with `fold`, which mixes them to one. In a single pass (DeepSeek
V4.1; `connect_late`) a sublayer reads by the pre that the sublayer before it computed.

The maps are computed in fp32 at least, as is a sum without comb; mixtures by comb are in the dtype of the streams.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise, pairwise_sum, rows_are_invariant, softmax
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm


@dataclass(frozen=True)
class HyperConnection:
    """Settings of hyper-connections.

    iterations: of Sinkhorn, each of which divides by the sums of rows and then of columns; the first, of a softmax,
        divides by those of columns alone. 0: there is no comb. eps: is added to pre, to the softmax and to each sum.
    norm_eps: of the RMS norm without a weight over all n D numbers of a token.
    post_scale, post_eps: post is post_scale sigmoid(..) + post_eps.
    """

    iterations: int
    eps: float
    norm_eps: float
    post_scale: float = 2.0
    post_eps: float = 0.0


class Maps(NamedTuple):
    """Weights of a sublayer's input, of its output and of the mixing of streams, in fp32 at least."""

    pre: Tensor  # [B, S, n]
    post: Tensor  # [B, S, n]
    comb: Tensor | None  # [B, S, n, n]: from stream j (dimension -2) to stream k (dimension -1); None: the identity


def opened(x: Tensor, streams: int) -> Tensor:
    """The streams [B, S, n, D] with which a stack begins: x [B, S, D] n times."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], streams, x.shape[-1]).contiguous()


def maps(weights: Mapping[str, Tensor], x: Tensor, how: HyperConnection) -> Maps:
    """The `Maps` of streams x [B, S, n, D].

    weights: "fn" [2 n + n n, n D], "base" [2 n + n n] and "scale" [3], for pre, post and comb in this order; without
    comb "fn" [2 n, n D], "base" [2 n] and "scale" [2].
    """
    n = x.shape[-2]
    sizes = (n, n, n * n) if how.iterations else (n, n)
    raw = linear(rms_norm(upcast(x).flatten(-2), None, eps=how.norm_eps), upcast(weights["fn"]))
    scales, bases = upcast(weights["scale"]).unbind(0), upcast(weights["base"]).split(sizes)
    pre, post, *rest = (
        part * scale + base for part, scale, base in zip(raw.split(sizes, -1), scales, bases, strict=True)
    )
    pre = elementwise(torch.sigmoid, pre) + how.eps
    post = how.post_scale * elementwise(torch.sigmoid, post)
    post = post + how.post_eps if how.post_eps else post
    if not rest:
        return Maps(pre, post, None)
    return Maps(pre, post, sinkhorn(softmax(rest[0].unflatten(-1, (n, n))) + how.eps, how.iterations, how.eps))


def sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """comb [..., n, n] after so many iterations: its rows and columns sum to nearly 1 (Sinkhorn and Knopp, 1967).

    Its rows must sum to 1 already: the first iteration divides by the sums of columns alone.
    """
    comb = comb / (_sum(comb, -2) + eps)
    for _ in range(iterations - 1):
        comb = comb / (_sum(comb, -1) + eps)
        comb = comb / (_sum(comb, -2) + eps)
    return comb


def collapse(x: Tensor, pre: Tensor) -> Tensor:
    """The input [B, S, D] of a sublayer: the sum of streams x [B, S, n, D] weighted by pre [B, S, n]."""
    if rows_are_invariant():
        return pairwise_sum(pre.unsqueeze(-1) * x, -2).to(x.dtype)
    return (pre.unsqueeze(-2) @ upcast(x)).squeeze(-2).to(x.dtype)


def connect(x: Tensor, y: Tensor, given: Maps) -> Tensor:
    """The streams [B, S, n, D] after a sublayer that returned y [B, S, D] of the streams x."""
    if given.comb is None:
        return (upcast(x) + given.post.unsqueeze(-1) * upcast(y).unsqueeze(-2)).to(x.dtype)
    added = given.post.to(x.dtype).unsqueeze(-1) * y.unsqueeze(-2)
    comb = given.comb.to(x.dtype)
    if rows_are_invariant():
        return added + pairwise_sum(comb.unsqueeze(-1) * x.unsqueeze(-2), -3)
    return added + comb.transpose(-1, -2) @ x


def connect_late(
    weights: Mapping[str, Tensor],
    x: Tensor,
    pre: Tensor,
    sublayer: Callable[[Tensor], Tensor],
    how: HyperConnection,
) -> tuple[Tensor, Tensor]:
    """(streams [B, S, n, D] after a sublayer, pre [B, S, n] for the next one): maps that are read one sublayer late.

    pre: from the sublayer before, and of the first one, that of `first_pre`; the last one's folds the streams, by
    `collapse`. So what a sublayer reads does not wait for maps of the streams that the one before it leaves.
    """
    given = maps(weights, x, how)
    return connect(x, sublayer(collapse(x, pre)), given), given.pre


def first_pre(x: Tensor) -> Tensor:
    """The pre [B, S, n] of a stack's first sublayer of streams x [B, S, n, D], in fp32 at least: the first of them."""
    one = torch.zeros_like(upcast(x[..., 0]))
    one[..., 0] = 1
    return one


def fold(weights: Mapping[str, Tensor], x: Tensor, how: HyperConnection) -> Tensor:
    """Streams x [B, S, n, D] as one, [B, S, D], after the last layer. weights: "fn" [n, n D], "base" [n], "scale" [1].

    `how.iterations` and `how.post_scale` play no part.
    """
    flat = rms_norm(upcast(x).flatten(-2), None, eps=how.norm_eps)
    raw = linear(flat, upcast(weights["fn"])) * upcast(weights["scale"]) + upcast(weights["base"])
    return collapse(x, elementwise(torch.sigmoid, raw) + how.eps)


def mean(x: Tensor) -> Tensor:
    """The mean of streams [B, S, n, D], [B, S, D]; what has no streams is returned as it is."""
    if x.ndim == 4 and rows_are_invariant():
        return (pairwise_sum(upcast(x), -2) / x.shape[-2]).to(x.dtype)
    return x.mean(-2) if x.ndim == 4 else x


def with_mean(x: Tensor, changed: Tensor) -> Tensor:
    """Streams x [B, S, n, D] whose mean is `changed` [B, S, D]: the difference is added to each of them."""
    return x + (changed - mean(x)).unsqueeze(-2) if x.ndim == 4 else changed


def _sum(x: Tensor, dim: int) -> Tensor:
    """The sum over a short dimension, which stays: element by element, so that rows have bits of their own."""
    first, *rest = x.split(1, dim)
    for part in rest:
        first = first + part
    return first

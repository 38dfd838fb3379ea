"""Residual streams from which each sublayer reads a mixture by gates of low rank (Qwen 3.8 Flash Next, 2026).

With streams x [B, S, n, D], their norms h_j = rms_norm(x_j) (1 + scale_j), their n D numbers h and a sublayer f:

    gates = sigmoid(up(silu(down(h) / n)))        [B, S, n, D]
    write = 2 sigmoid(inject(h) / n)              [B, S, n]
    y_j = x_j + write_j f(mean over k of gates_k h_k)

A stack begins with n equal streams (`hyper.opened`) and ends with the mean that a sublayer would read. What a sublayer
reads is normed already.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise, pairwise_sum, rows_are_invariant
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm


def normed(weights: Mapping[str, Tensor], x: Tensor, *, eps: float) -> Tensor:
    """The norms [B, S, n, D] of streams x, by "scale" [n D]."""
    scale = 1 + upcast(weights["scale"]).unflatten(0, x.shape[-2:])
    return (rms_norm(upcast(x), None, eps=eps) * scale).to(x.dtype)


def mixed(weights: Mapping[str, Tensor], h: Tensor) -> Tensor:
    """What a sublayer reads of the normed streams h [B, S, n, D]: [B, S, D].

    weights: "down_proj" [rank, n D] and "up_proj" [n D, rank].
    """
    n = h.shape[-2]
    inner = elementwise(F.silu, linear(h.flatten(-2), weights["down_proj"]) / n)
    gated = elementwise(torch.sigmoid, linear(inner, weights["up_proj"])).unflatten(-1, h.shape[-2:]) * h
    return pairwise_sum(gated, -2) / n if rows_are_invariant() else gated.mean(-2)


def written(weights: Mapping[str, Tensor], x: Tensor, h: Tensor, y: Tensor) -> Tensor:
    """The streams [B, S, n, D] after a sublayer that returned y [B, S, D] of the streams x, whose norms are h.

    weights: "inject" [n, n D].
    """
    share = 2 * elementwise(torch.sigmoid, linear(h.flatten(-2), weights["inject"]) / h.shape[-2])
    return x + share.unsqueeze(-1) * y.unsqueeze(-2)


def folded(weights: Mapping[str, Tensor], x: Tensor, *, eps: float) -> Tensor:
    """Streams x [B, S, n, D] as one, [B, S, D], after the last layer."""
    return mixed(weights, normed(weights, x, eps=eps))

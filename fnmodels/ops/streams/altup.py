"""AltUp: a residual stream of n rows of which layers compute on one (arXiv 2301.13310), as Gemma 3n has it.

With streams x [B, S, n, D], a layer f, and maps p and c of a token's first row, each with values through a tanh:

    predicted_k = x_k + sum_j p_kj x_j
    y_k = predicted_k + (1 + c_k) (f(predicted_0) - predicted_0)
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise, pairwise_sum, rows_are_invariant
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm_fp32_weight

_LEAST = 1e-5  # mean square of a row that is scaled


def opened(projections: Tensor, x: Tensor) -> Tensor:
    """The streams [B, S, n, D] with which a stack begins: x [B, S, D] and its projections, as long as x.

    projections: [n - 1, D, D].
    """
    rows = range(projections.shape[0])  # an iterator over a parameter would be no use of it
    return torch.stack([x, *(_as_long_as(x, linear(x, projections[i])) for i in rows)], -2)


def folded(projections: Tensor, x: Tensor) -> Tensor:
    """The mean [B, S, D] of streams [B, S, n, D], those after the first projected and scaled as in `opened`."""
    first, *others = x.unbind(-2)
    rows = [first, *(_as_long_as(first, linear(row, projections[i])) for i, row in enumerate(others))]
    return pairwise_sum(torch.stack(rows, -2), -2) / len(rows)


def _as_long_as(x: Tensor, y: Tensor) -> Tensor:
    """y [.., D] times the ratio of the root mean squares of x and y."""
    return y * _root(_mean(x * x)) / _mean(y * y).clamp(min=_LEAST).sqrt()


def _mean(x: Tensor) -> Tensor:
    """The mean of the last dimension, [.., 1]."""
    return pairwise_sum(x, -1)[..., None] / x.shape[-1] if rows_are_invariant() else x.mean(-1, keepdim=True)


def _root(x: Tensor) -> Tensor:
    """The square root, whose gradient at 0, in padding, is 0."""
    return x.clamp(min=torch.finfo(x.dtype).tiny).sqrt()


def routed(weights: Mapping[str, Tensor], x: Tensor, *, eps: float) -> Tensor:
    """tanh of n numbers of each token, [B, S, n], of its row x [B, S, D]."""
    normed = rms_norm_fp32_weight(x, weights["router_norm"], eps=eps) / x.shape[-1]
    return elementwise(torch.tanh, upcast(linear(normed, weights["modality"]))).to(x.dtype)


def predict(weights: Mapping[str, Tensor], x: Tensor, *, eps: float) -> Tensor:
    """The streams [B, S, n, D] that a layer reads, and corrects, of streams x.

    weights: "router_norm" [D], "modality" [n, D], "predict" [n n, n].
    """
    n = x.shape[-2]
    maps = linear(routed(weights, x[..., 0, :], eps=eps), weights["predict"]).unflatten(-1, (n, n))
    if rows_are_invariant():
        return x + pairwise_sum(maps[..., None] * x.unsqueeze(-3), -2)
    return x + maps @ x


def correct(weights: Mapping[str, Tensor], predicted: Tensor, y: Tensor, *, eps: float) -> Tensor:
    """The streams [B, S, n, D] after a layer that returned y [B, S, D] of the first of the predicted ones.

    weights: "router_norm" [D], "modality" [n, D], "correct" [n, n].
    """
    scales = linear(routed(weights, y, eps=eps), weights["correct"]) + 1
    return predicted + scales[..., None] * (y - predicted[..., 0, :]).unsqueeze(-2)


def most_of_normal(x: Tensor, deviations: float) -> Tensor:
    """relu(x - mean - deviations x standard deviation) of each [.., F]: of normal x, its largest elements alone."""
    mean = _mean(x)
    return elementwise(torch.relu, x - (mean + _root(_mean((x - mean).square())) * deviations))

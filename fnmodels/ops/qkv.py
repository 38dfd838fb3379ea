"""Query, key, value and output projections of attention, and the split into heads."""

from collections.abc import Mapping

from torch import Tensor

from .linear import linear, linears


def project_qkv(weights: Mapping[str, Tensor], x: Tensor, *, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, S, N, H], k and v [B, S, G, H] of x [B, S, D]; the biases are optional leaves."""
    q, k, v = linears(x, weights, "qkv")  # of more tokens than x where those are shards
    return split_heads(q, head_dim), split_heads(k, head_dim), split_heads(v, head_dim)


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """Split the last dimension into heads: [B, S, N H] -> [B, S, N, H]."""
    *rows, width = x.shape
    return x.view(*rows, width // head_dim, head_dim)


def project_out(weights: Mapping[str, Tensor], heads: Tensor) -> Tensor:
    """The output projection: heads [B, S, N, H] -> [B, S, D]; the bias is optional."""
    return linear(heads.flatten(-2), weights["o_proj"], weights.get("o_bias"))

"""The rotation of DeepSeek V4's keys, which are values too, and the output projection of its heads."""

import torch
from torch import Tensor

from fnmodels.ops import apply_rotary_interleaved
from fnmodels.ops.linear import linear
from fnmodels.ops.rotary import Rotation, apply_rotary_last, table_of
from fnmodels.tree import Tree


def rotate(x: Tensor, table: Tensor | Rotation) -> Tensor:
    """x [B, S, N, H] with pairs (2i, 2i + 1) of its last R dimensions rotated; table [B or 1, S, R/2, 2]."""
    return apply_rotary_last(x, table, apply_rotary_interleaved)


def rotated_back(z: Tensor, table: Tensor | Rotation) -> Tensor:
    """What heads read, z [B, S, N, H], as the key of a query's own position is rotated."""
    cos, sin = table_of(table).unbind(-1)
    return rotate(z, torch.stack((cos, -sin), -1))


def project_heads(weights: Tree, z: Tensor, rank: int) -> Tensor:
    """The output of heads z [B, S, N, H], by a projection of rank `rank` within each group of heads: [B, S, D]."""
    groups = weights["o_a"].shape[0] // rank
    grouped = z.unflatten(2, (groups, -1)).flatten(3)
    inner = torch.stack([linear(grouped[:, :, g], w) for g, w in enumerate(weights["o_a"].chunk(groups))], 2)
    return linear(inner.flatten(2), weights["o_b_proj"])

"""Learned position tables of vision towers, resampled to the grid of each image as the published models do it."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.values import readable
from fnmodels.ops.dtypes import in_fp64
from fnmodels.ops.embedding import look_up


def bicubic(index: Tensor, count: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Taps that resample `side` entries at `index` of `count` as `F.interpolate(mode="bicubic")` does.

    index, count: integers [B, S]. Returns (entries, int64 [B, S, 4]; weights, fp64 [B, S, 4]).
    """
    at = (index.double() + 0.5) * (side / count.double()) - 0.5
    low = at.floor()
    t, a = at - low, -0.75
    near = [((a + 2) * x - (a + 3)) * x * x + 1 for x in (t, 1 - t)]
    far = [((a * x - 5 * a) * x + 8 * a) * x - 4 * a for x in (t + 1, 2 - t)]
    taps = low.long()[..., None] + torch.arange(-1, 3, device=index.device)
    return taps.clamp(0, side - 1), torch.stack((far[0], near[0], near[1], far[1]), -1)


def bilinear(index: Tensor, count: Tensor, side: int, *, excess: float = 0.0) -> tuple[Tensor, Tensor]:
    """As `bicubic`, but as `F.interpolate(mode="bilinear")` without antialiasing; there are 2 taps.

    excess: the scale is that of this many patches more, (count + excess) / side.
    """
    at = ((index.double() + 0.5) * (side / (count.double() + excess)) - 0.5).clamp(min=0)
    low = at.floor()
    taps = low.long()[..., None] + torch.arange(2, device=index.device)
    return taps.clamp(max=side - 1), torch.stack((1 - (at - low), at - low), -1)


def bilinear_zeros(index: Tensor, count: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """As `bilinear`, but outside of the table are zeros, as `F.grid_sample` reads it without aligned corners."""
    at = (index.double() + 0.5) * (side / count.double()) - 0.5
    low = at.floor()
    taps = low.long()[..., None] + torch.arange(2, device=index.device)
    weights = torch.stack((1 - (at - low), at - low), -1) * ((taps >= 0) & (taps < side))
    return taps.clamp(0, side - 1), weights


def bilinear_corners(index: Tensor, count: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """As `bicubic`, but as `F.interpolate(mode="bilinear", align_corners=True)`; there are 2 taps."""
    at = index.double() * ((side - 1) / (count.double() - 1).clamp(min=1))
    low = at.floor().clamp(max=max(side - 2, 0))
    taps = low.long()[..., None] + torch.arange(2, device=index.device)
    return taps.clamp(max=side - 1), torch.stack((1 - (at - low), at - low), -1)


def bilinear_antialias(index: Tensor, count: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """As `bicubic`, but as `F.interpolate(mode="bilinear", antialias=True)`; there are as many taps as entries."""
    return _antialias(index, count, side, lambda x: (1 - x).clamp(min=0))


def bicubic_antialias(index: Tensor, count: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """As `bicubic`, but as `F.interpolate(mode="bicubic", antialias=True)`; there are as many taps as entries."""

    def weight(x: Tensor) -> Tensor:
        near, far = (1.5 * x - 2.5) * x * x + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2
        return torch.where(x < 1, near, far.where(x < 2, 0))

    return _antialias(index, count, side, weight)


def by_fraction(index: Tensor, count: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """As `bicubic`, but the one entry in whose cell of the table's grid the patch begins (Idefics 3, arXiv 2408.12637).

    In fp32 as the published model, which rounds at the borders of cells.
    """
    begin = (index.float() * (1.0 / count.float())).clamp(max=1.0 - 1e-6)
    borders = torch.arange(1 / side, 1.0, 1 / side, device=index.device)
    entries = torch.bucketize(begin, borders, right=True)[..., None].clamp(max=side - 1)
    return entries, torch.ones_like(entries, dtype=torch.float64)


def _antialias(index: Tensor, count: Tensor, side: int, weight: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Every entry is a tap, with the weight of its distance in steps of the coarser grid."""
    scale = (side / count.double())[..., None]
    center = (index.double()[..., None] + 0.5) * scale
    entries = torch.arange(side, device=index.device).expand(*index.shape, side)
    weights = weight((entries + 0.5 - center).abs() / scale.clamp(min=1))
    return entries, weights / weights.sum(-1, keepdim=True)


Resample = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@in_fp64
def table_inputs(config: Any, positions: Tensor, *, resample: Resample, placed: int = 1) -> dict[str, Tensor]:
    """Inputs made by `prepare` for a learned position table [placed + side * side, D] resampled to each image's grid.

    placed: how many special tokens have an entry, before those of patches; others have no position. "table_index" int64
    [B, S, K], the entries that a token's position is made of, and "table_weight" fp32 [B, S, K], their weights. K is
    what the batch needs, or, where its values cannot be read, what any grid needs.
    """
    side, patch = config.side, positions.clamp(min=0)
    (rows, by_row), (columns, by_column) = (
        resample(patch[..., axis], patch[..., 2 + axis].clamp(min=1), side) for axis in (0, 1)
    )
    index = placed + (rows[..., :, None] * side + columns[..., None, :]).flatten(-2)
    weights = (by_row[..., :, None] * by_column[..., None, :]).flatten(-2)
    special = positions[..., :1] + config.special_tokens  # of special tokens from 0
    is_special = positions[..., :1] < 0
    index = torch.where(is_special, special.clamp(0, max(placed - 1, 0)), index)
    first = torch.zeros_like(weights)
    first[..., 0] = 1
    weights = torch.where(is_special, first * (special < placed), weights)
    if readable(weights):  # an image of the table's own grid reads one entry for each patch, and not those around it
        used = (weights != 0).flatten(0, -2).any(0)
        used[0] = True
        index, weights = index[..., used], weights[..., used]
    return {"table_index": index, "table_weight": weights.float()}


def table_positions(table: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """The position vectors [B, S, D] of a table [entries, D]: sums of entries in fp32, in the table's dtype."""
    index, weights = inputs["table_index"], inputs["table_weight"]
    total: Any = 0
    for k in range(index.shape[-1]):  # a gather of all at once would need K times the memory
        total = total + look_up(table, index[..., k], "entries of the position table") * weights[..., k, None]
    return total.to(table.dtype)

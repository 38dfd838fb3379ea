"""Conversion of a `Mask` to FlexAttention's BlockMask without a dense mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.mask import Mask, MaskLike
from fnmodels.inputs.rules import Range, Tokens
from fnmodels.inputs.values import aside, has_values
from fnmodels.tree import leaves


def is_block_mask(mask: MaskLike) -> bool:
    """Whether `mask` is a BlockMask, recognized by its attributes: the module that defines it is slow to import."""
    return hasattr(mask, "mask_mod") and hasattr(mask, "kv_num_blocks")


def _block_mask_to_dense(mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import create_mask

    # Not `mask.to_dense()`, which supports blocks of 128 x 128 only.
    (batch, heads), (queries, keys) = mask.kv_num_blocks.shape[:2], mask.seq_lengths
    try:
        return create_mask(mask.mask_mod, batch, heads, queries, keys, mask.kv_num_blocks.device)
    except RuntimeError as error:
        if "sliced" not in str(error):
            raise
        raise ValueError(
            "This BlockMask was sliced, and a slice has no predicate any more: pass the full one, or a "
            "fnmodels.inputs.Mask."
        ) from error


TILE = 128  # queries and keys per block of FlexAttention
Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (row, head, query, key) -> bool, of indices
ELEMENTS = 1 << 22  # of the predicate, evaluated at a time on the CPU; more on a GPU, which is bound by launches


def to_block_mask(mask: MaskLike) -> Any:
    """FlexAttention's BlockMask of a mask.

    It equals `create_block_mask(mask.mask_mod(), ...)`, which needs memory Q x K. On the CPU in eager mode the
    predicate is evaluated only on tiles that the rule's bounds (`Rule.visible`, `Rule.covers`) leave undecided.
    Elsewhere the values cannot be read without a sync, and it is evaluated on all tiles, a few rows of tiles at a time.

    Args:
        mask: A `Mask`, or bool [B or 1, N or 1, Q, K] such as that of chosen keys, which the predicate then looks up; a
            BlockMask is returned as it is.

    Returns:
        The BlockMask, of tiles of 128.

    Raises:
        ValueError: The mask is of another kind, or has no queries or keys.
    """
    if is_block_mask(mask):
        return mask
    if not isinstance(mask, Mask | Tensor):
        raise ValueError(
            f"A BlockMask is made of a fnmodels.inputs.Mask or of a bool tensor, not of a {type(mask).__name__}."
        )
    if isinstance(mask, Tensor) and (mask.dtype != torch.bool or mask.ndim != 4):
        raise ValueError(
            f"A BlockMask is made of a bool tensor [B or 1, N or 1, Q, K], True where a query sees a key; this one is "
            f"{str(mask.dtype).removeprefix('torch.')} {list(mask.shape)}."
        )
    queries, keys = mask.shape[-2:] if isinstance(mask, Tensor) else _lengths(mask)
    if not queries or not keys:
        raise ValueError(f"A BlockMask has a query and a key at least, this mask has {queries} and {keys}.")
    if isinstance(mask, Tensor):
        return block_mask_of_tiles(*_tiles_of(mask), _looked_up(mask), (queries, keys))
    if not torch.compiler.is_compiling() and all(has_values(t) and t.is_cpu for t in leaves(mask)):
        touched, full = aside(_tiles_by_bounds, mask)
    else:
        touched, full = _tiles_by_evaluation(mask)
    return block_mask_of_tiles(touched, full, mask.mask_mod(), (queries, keys))


def block_mask_of_tiles(touched: Tensor, full: Tensor, mask_mod: Predicate, lengths: tuple[int, int]) -> Any:
    """The BlockMask of (queries, keys) `lengths`.

    touched, full: bool [B or 1, N or 1, q, k], the tiles in which some query sees a key, and in which all see all.
    """
    from torch.nn.attention.flex_attention import BlockMask

    blocks = (*_counts_and_indices(touched & ~full), *_counts_and_indices(full))
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=TILE, mask_mod=mask_mod, seq_lengths=lengths)


def _lengths(mask: Mask) -> tuple[int, int]:
    return mask.q_positions.shape[1], mask.kv_positions.shape[1]


def _looked_up(seen: Tensor) -> Predicate:
    """The predicate of bool [B or 1, N or 1, Q, K]."""
    rows, heads = seen.shape[:2]

    def allowed(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return seen[row % rows, head % heads, query, key]

    return allowed


def _tiles_of(seen: Tensor) -> tuple[Tensor, Tensor]:
    """(touched, full), bool [B, N, q, k]: tiles of bool [B, N, Q, K] in which some is True, and in which all are."""
    seen = F.pad(seen, (0, -seen.shape[3] % TILE, 0, -seen.shape[2] % TILE))
    tiles = seen.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE))
    return tiles.any(dim=5).any(dim=3), tiles.all(dim=5).all(dim=3)


def _tiles_by_evaluation(mask: Mask) -> tuple[Tensor, Tensor]:
    """(touched, full), bool [B, 1, q, k]: tiles in which some query sees a key, tiles in which all see all."""
    queries, keys = mask.q_positions.shape[1], mask.kv_positions.shape[1]
    at_once = 16 * ELEMENTS if mask.q_positions.is_cuda else ELEMENTS
    step = TILE * max(1, at_once // (TILE * keys * mask.q_positions.shape[0]))
    touched, full = [], []
    for begin in range(0, queries, step):
        tiles = _tiles_of(mask.select(slice(begin, begin + step), slice(None)).dense())
        touched.append(tiles[0])
        full.append(tiles[1])
    return torch.cat(touched, dim=2), torch.cat(full, dim=2)


def _tiles_by_bounds(mask: Mask) -> tuple[Tensor, Tensor]:
    """`_tiles_by_evaluation` on the host, evaluating only the tiles that bounds leave undecided."""
    tensors = leaves(mask)
    rows = max(t.shape[0] for t in tensors)
    # Rows expanded from one row are computed once.
    distinct = 1 if all(t.shape[0] == 1 or t.stride(0) == 0 for t in tensors) else rows
    tiles_of_rows = [
        _tiles_of_row(mask.select(slice(None), slice(None), slice(row, row + 1))) for row in range(distinct)
    ]
    touched, full = (torch.stack(each)[:, None].expand(rows, -1, -1, -1) for each in zip(*tiles_of_rows, strict=True))
    return touched, full


def _tiles_of_row(mask: Mask) -> tuple[Tensor, Tensor]:
    """(touched, full) [q, k] of one row: a quadtree of tiles, whose undecided leaves are evaluated."""
    q = _tiled(mask.q_positions, mask.q_segments, mask.q_spans)
    kv = _tiled(mask.kv_positions, mask.kv_segments, mask.kv_spans)
    q_levels, kv_levels = _bounds(q), _bounds(kv)
    full = torch.zeros(len(q.positions), len(kv.positions), dtype=torch.bool)
    unknown: list[tuple[int, int]] = []
    waiting = [(len(q_levels) - 1, 0, len(kv_levels) - 1, 0)]
    while waiting:
        a, i, b, j = waiting.pop()
        queries, keys = q_levels[a][i], kv_levels[b][j]
        if queries is None or keys is None:
            continue
        (q_positions, q_segments, q_one), (kv_positions, kv_segments, kv_one) = queries, keys
        low, high = mask.rule.visible(q_positions)
        if kv_positions[1] < low or kv_positions[0] > high:
            continue
        if kv_segments[1] < q_segments[0] or kv_segments[0] > q_segments[1]:
            continue
        if q_one and kv_one and q_segments == kv_segments and mask.rule.covers(q_positions, kv_positions):
            full[i << a : (i + 1) << a, j << b : (j + 1) << b] = True
        elif a == b == 0:
            unknown.append((i, j))
        else:
            q_halves = [(a - 1, 2 * i), (a - 1, 2 * i + 1)] if a >= b else [(a, i)]
            kv_halves = [(b - 1, 2 * j), (b - 1, 2 * j + 1)] if b >= a else [(b, j)]
            waiting += [(*q_half, *kv_half) for q_half, kv_half in itertools.product(q_halves, kv_halves)]
    touched = full.clone()
    for tiles in torch.tensor(unknown, dtype=torch.long).view(-1, 2).split(max(1, ELEMENTS // TILE**2)):
        i_s, j_s = tiles.unbind(1)
        seen = mask.allowed(_select(q, i_s, -1), _select(kv, j_s, -2))
        touched[i_s, j_s] = seen.flatten(1).any(dim=1)
        full[i_s, j_s] = seen.flatten(1).all(dim=1)
    return touched, full


def _tiled(positions: Tensor, segments: Tensor, spans: Tensor | None) -> Tokens:
    """[1, S] -> [tiles, TILE], padded at the end."""

    def tiled(tensor: Tensor) -> Tensor:
        return F.pad(tensor[0], (0, -positions.shape[1] % TILE)).unflatten(0, (-1, TILE))

    return Tokens(tiled(positions), tiled(segments), None if spans is None else tiled(spans))


def _select(tokens: Tokens, which: Tensor, dim: int) -> Tokens:
    spans = None if tokens.spans is None else tokens.spans[which].unsqueeze(dim)
    return Tokens(tokens.positions[which].unsqueeze(dim), tokens.segments[which].unsqueeze(dim), spans)


# Range of positions, range of segments (both without padding), and whether all tokens are of one segment.
_TileBounds = tuple[Range, Range, bool]


def _bounds(tokens: Tokens) -> list[list[_TileBounds | None]]:
    """Bounds per tile, then per 2, 4, ... adjacent tiles; None where there is only padding."""
    real = tokens.segments > 0
    most = torch.iinfo(torch.int64).max
    lows = [t.long().where(real, most).amin(dim=1).tolist() for t in (tokens.positions, tokens.segments)]
    highs = [t.long().where(real, -most).amax(dim=1).tolist() for t in (tokens.positions, tokens.segments)]
    levels: list[list[_TileBounds | None]] = [[]]
    all_real = real.all(dim=1).tolist()
    for low, high, first, last, full in zip(lows[0], highs[0], lows[1], highs[1], all_real, strict=True):
        levels[0].append(((low, high), (first, last), full and first == last) if first <= last else None)
    while len(levels[-1]) > 1:
        below = levels[-1] + [None] * (len(levels[-1]) % 2)
        levels.append([_merge(*pair) for pair in zip(below[::2], below[1::2], strict=True)])
        levels[-2] = below
    return levels


def _merge(left: _TileBounds | None, right: _TileBounds | None) -> _TileBounds | None:
    if left is None or right is None:
        present = left or right
        return None if present is None else (*present[:2], False)
    ranges = [(min(a[0], b[0]), max(a[1], b[1])) for a, b in zip(left[:2], right[:2], strict=True)]
    return ranges[0], ranges[1], left[2] and right[2] and left[1] == right[1]


def _counts_and_indices(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """BlockMask's (count of True tiles per row, tile indices with the True ones first) of bool [B, 1, q, k]."""
    return tiles.sum(dim=-1, dtype=torch.int32), tiles.int().argsort(dim=-1, descending=True, stable=True).int()

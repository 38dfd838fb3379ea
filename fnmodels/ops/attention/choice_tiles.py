"""The BlockMask of a `Choice`, by which kernel="flex" skips the tiles of 128 x 128 in which no query chose a key.

The chosen keys of a query are one bit each of int32 words: K / 8 bytes for a query, where a dense mask has K. Memory is
still quadratic in the sequence, but is less than that of the choice itself, 9 k bytes for a query, for up to 72 k keys.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.inputs.block_mask import TILE, Predicate, block_mask_of_tiles

from .choice import Choice

_SHIFT = 5
_BITS = 1 << _SHIFT  # of a word
_ENTRIES = 1 << 20  # of the choice, of which there are temporary copies at a time


def choice_block_mask(choice: Choice, heads: int) -> Any:
    """The BlockMask [B or 1, 1 or N, Q, K] of a choice, for N = `heads` of queries; 1 where all heads share a choice.

    ValueError for a choice of no queries or among no keys.
    """
    rows, groups, queries, keys = choice.shape
    if not queries or not keys:
        raise ValueError(f"A BlockMask has a query and a key at least, this choice has {queries} and {keys}.")
    shape = (rows * groups, queries, -(-keys // TILE) * TILE // _BITS)
    words = torch.zeros(shape, dtype=torch.int32, device=choice.index.device)
    touched, full = [], []
    for part in _parts(choice):
        index, seen = choice.index[:, part], choice.seen[:, part]
        # Each key is seen once, so that sums of bits are unions; the last bit is the sign.
        words[:, part].scatter_add_(-1, index >> _SHIFT, seen.int() << (index & (_BITS - 1)).int())
        some, all_keys = _tiles_of(words[:, part])
        touched.append(some)
        full.append(all_keys)
    repeats = heads // groups if groups > 1 else 1
    tiles = (torch.cat(t, dim=1).unflatten(0, (rows, groups)) for t in (touched, full))
    some, all_keys = (t.repeat_interleave(repeats, dim=1) for t in tiles)
    predicate = _looked_up(words.unflatten(0, (rows, groups)), heads // groups)
    return block_mask_of_tiles(some, all_keys, predicate, (queries, keys))


def _parts(choice: Choice) -> Iterator[slice]:
    """Slices of the queries, of complete tiles but the last. A compiled graph has one: it would write out the loop."""
    if torch.compiler.is_compiling():
        return iter((slice(None),))
    rows, queries, most = choice.index.shape
    step = TILE * max(1, _ENTRIES // max(1, TILE * rows * most))
    return (slice(start, start + step) for start in range(0, queries, step))


def _tiles_of(words: Tensor) -> tuple[Tensor, Tensor]:
    """(touched, full), bool [B, q, k], of words [B, Q, W]: tiles in which some bit is set, and in which all are."""
    tiles = F.pad(words, (0, 0, 0, -words.shape[1] % TILE)).unflatten(2, (-1, TILE // _BITS)).unflatten(1, (-1, TILE))
    return (tiles != 0).any(-1).any(2), (tiles == -1).all(-1).all(2)


def _looked_up(words: Tensor, repeats: int) -> Predicate:
    """The predicate of words [B or 1, G, Q, W], each of which `repeats` heads of queries share."""
    rows = words.shape[0]

    def chosen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        word = words[row % rows, head // repeats, query, key >> _SHIFT]
        return (word >> (key & (_BITS - 1))) & 1 != 0

    return chosen

"""Keys of noise: one number per token, from which `ops.dropout` computes masks by hashing and never by drawing.

A key depends on the seed, the document and the position in it, so that a token keeps it however rows are packed,
permuted, split or sharded. The hash maps 32-bit integers to 32-bit integers, in int64, whose products here stay below
2^63 on every device. Its constants are those of github.com/skeeto/hash-prospector, issue 19 (bias 0.11 at most).
"""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor

WORD = 0xFFFFFFFF  # of 32 bits
GOLDEN = 0x9E3779B9  # moves the fixed point of the hash, which is 0


def mixed(x: Tensor) -> Tensor:
    """A bijection of the integers below 2^32 (int64), each bit of the result depending on all bits of x."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & WORD
    return x ^ (x >> 15)


def fold(keys: Tensor, number: Tensor | int) -> Tensor:
    """Other keys for each number: int64 below 2^32, of the broadcast shape; any 64-bit number has its keys."""
    return mixed(keys ^ _hashed(number, keys))


def _hashed(number: Tensor | int, keys: Tensor) -> Tensor:
    """The hash of any 64-bit numbers, on the device of `keys`."""
    number = torch.as_tensor(number, device=keys.device)
    low = mixed(((number & WORD) + GOLDEN) & WORD)
    return mixed((low + ((number >> 32) & WORD)) & WORD)


def unfold(keys: Tensor, number: Tensor | int) -> Tensor:
    """The keys of which `fold` with this number made `keys`."""
    x = keys ^ (keys >> 15) ^ (keys >> 30)
    x = (x * -1760353753) & WORD  # inverses of the hash's constants modulo 2^32, of the smaller absolute value
    x = ((x ^ (x >> 15) ^ (x >> 30)) * 859588901) & WORD
    return x ^ (x >> 16) ^ _hashed(number, keys)


def document_keys(keys: Tensor, positions: Tensor) -> Tensor:
    """Keys [B, S] that all tokens of a document share, of `noise_keys` and their positions [B, S] or [B, S, axes]."""
    for axis in reversed(positions.unbind(-1)) if positions.ndim == 3 else (positions,):
        keys = unfold(keys, axis)
    return keys


def noise_keys(rng: int | Tensor, positions: Tensor, segment_ids: Tensor) -> Tensor:
    """The keys of noise of each token, for `fnmodels.prepare(..., rng=)` and the batch key "rng".

    Args:
        rng: A seed, an int or a 0-d integer tensor (which vmap may map). Documents are then numbered in the order of
            rows and segment ids, so that packed documents have the keys that they have in separate rows, in the same
            order. Under vmap over rows each call numbers its own, so that rows need different seeds. Or int64 [B], a
            seed for each row, whose documents are numbered by segment ids. Or int64 [B, S], keys that this function
            returned, which are returned unchanged.
        positions: int64 [B, S], or [B, S, axes].
        segment_ids: int64 [B, S], documents from 1, padding 0 or less.

    Returns:
        int64 [B, S], from 0 to 2^32 - 1. Of padding they have no meaning.
    """
    seeds = _seeds(rng, segment_ids)
    if seeds.ndim == 2:
        return seeds
    documents = segment_ids.clamp(min=0)
    if not seeds.ndim and documents.shape[1]:
        counts = documents.amax(dim=1, keepdim=True)
        documents = documents + counts.cumsum(0) - counts
    keys = fold(torch.full_like(documents, GOLDEN), seeds[:, None] if seeds.ndim else seeds)
    keys = fold(keys, documents)
    for axis in positions.unbind(-1) if positions.ndim == 3 else (positions,):
        keys = fold(keys, axis)
    return keys


def _seeds(rng: int | Tensor, segment_ids: Tensor) -> Tensor:
    """rng as an int64 tensor; TypeError or ValueError for what is none of the three."""
    rows = segment_ids.shape
    if isinstance(rng, bool) or not isinstance(rng, (Integral, Tensor)):
        raise TypeError(f"rng is {rng!r}; it is a seed, an int, or a tensor of integers [], [B] or [B, S].")
    if not isinstance(rng, Tensor):
        rng = torch.tensor((int(rng) + 2**63) % 2**64 - 2**63, device=segment_ids.device)  # its last 64 bits
    if rng.dtype == torch.bool or rng.is_floating_point() or rng.is_complex():
        raise TypeError(f"rng is {str(rng.dtype).removeprefix('torch.')}; seeds and keys are integers.")
    if rng.shape not in ((), rows[:1], rows):
        raise ValueError(
            f"rng is {list(rng.shape)}; it is a seed [], a seed for each row [{rows[0]}], or the keys of tokens "
            f"{list(rows)}."
        )
    return rng.to(segment_ids.device, torch.int64)

"""Attention with linear biases (ALiBi, arXiv 2108.12409): a score falls with the distance of its key, by head.

A softmax does not see what is the same for all keys, so that the bias is a slope times the key's position: a product of
two more dimensions of queries and keys, which every kernel computes. A position is stored as two numbers below 256,
which half precision holds exactly.
"""

import torch
from torch import Tensor

_PART = 256


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head: powers of 2 down to 2^-8, and those between them if `heads` is no power of 2."""
    whole = 1 << (heads.bit_length() - 1)  # the power of 2 at or below
    steps = [8 * (i + 1) / whole for i in range(whole)]
    steps += [4 * (2 * i + 1) / whole for i in range(heads - whole)]
    return tuple(2.0**-step for step in steps)


def places_of(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, S, 2] of positions [B, S] below 65536: how often 256 goes into them, and what is left."""
    high = (positions / _PART).floor()
    return torch.stack((high, positions - high * _PART), -1).to(dtype)


def with_alibi(q: Tensor, k: Tensor, slopes: Tensor, places: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """q [B, Q, N, H] and k [B, K, G, H] with two more dimensions, whose product times `scale` is the bias.

    slopes: fp32 [B or 1, Q, N]. places: of the keys, [B or 1, K, 2], see `places_of`.
    """
    steep = (slopes / scale).to(q.dtype)
    q = torch.cat((q, torch.stack((steep * _PART, steep), -1).expand(*q.shape[:-1], -1)), -1)
    return q, torch.cat((k, places[:, :, None].to(k.dtype).expand(*k.shape[:-1], -1)), -1)

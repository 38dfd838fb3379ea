"""Embeddings of hashed n-grams that a layer adds to residual streams (Qwen 3.8 Flash Next, 2026).

With the tokens u of a document, odd multipliers m, and streams x [B, S, n, D] of norms h_j:

    row of head h of order n at t:  (u_t m_0 ^ u_{t-1} m_1 ^ ... ^ u_{t-n+1} m_{n-1}) mod prime_h, after other heads
    e_t    = the rows of all heads, side by side
    g_tj   = norm(key_j(e_t)) . h_tj / sqrt(D)
    v_tj   = sigmoid(sign(g_tj) sqrt(|g_tj|)) value(e_t)
    y_tj   = x_tj + v_tj + silu(sum over i of w_ij norm(v)_{t - i d, j})

A token that the document does not have counts as the one that ends a text, and so does all before such an end. The
convolution steps over d tokens, the longest n-gram, and reads its own document alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from fnmodels.ops.embedding import look_up
from fnmodels.ops.invariant.rows import elementwise, pairwise_sum, rows_are_invariant
from fnmodels.ops.linear import linear
from fnmodels.ops.recurrent.conv import short_conv

from .gated import normed

_BITS64 = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_LAYER_STEP = 10007  # between the seeds of two tables
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


@dataclass(frozen=True)
class XorHash:
    """The hash that maps the n-grams of a layer to rows of its table.

    multipliers: odd, of a token and of those before it. sizes: the rows of each head, those of bigrams first; heads of
    an order stand together. end: the token id that ends a text.
    """

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    end: int


def xor_hashes(size: int, heads: int, rows: int, vocabulary: int, seed: int, end: int) -> Iterator[XorHash]:
    """The hashes of table after table of n-grams of up to `size` tokens, with `heads` of each order.

    The rows of all heads are different primes from `rows` on. vocabulary: bounds the products of ids and multipliers.
    """
    primes = (number for number in count(rows) if is_prime(number))
    bound = max(1, ((1 << 63) - 1) // vocabulary // 2)
    for table in count():
        base = seed + _LAYER_STEP * table
        drawn = [_split_mix(base + _GAMMA * (j + 1)) % bound for j in range(size)]
        yield XorHash(tuple(2 * n + 1 for n in drawn), tuple(islice(primes, (size - 1) * heads)), end)


def _split_mix(value: int) -> int:
    """The number of SplitMix64 (Steele, Lea and Flood, 2014) after the state `value`."""
    value = (value + _GAMMA) & _BITS64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _BITS64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _BITS64
    return value ^ (value >> 31)


def is_prime(number: int) -> bool:
    """Whether a number below 2^64 is prime: Miller and Rabin's test with witnesses that suffice there."""
    if number < 2 or any(number % prime == 0 for prime in _WITNESSES):
        return number in _WITNESSES
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(number, pow(witness, odd, number), twos) for witness in _WITNESSES)


def _passes(number: int, power: int, twos: int) -> bool:
    return power == 1 or any(pow(power, 1 << i, number) == number - 1 for i in range(twos))


def xor_rows(tokens: Tensor, preceding: Tensor, how: XorHash) -> Tensor:
    """The row of each token in the table for each head, int64 [B, S, heads].

    tokens: int64 [B, S]. preceding: int64 [B, S, n - 1], of `fnmodels.inputs.segments.preceding_tokens`.
    """
    past = (preceding == how.end).cumsum(-1) > 0  # no text reads tokens before the end of another
    return mixed_rows(tokens, preceding.where((preceding >= 0) & ~past, how.end), how)


def mixed_rows(tokens: Tensor, near: Tensor, how: XorHash) -> Tensor:
    """The rows [B, S, heads] of tokens [B, S] and of those before each, near [B, S, n - 1], all of which count."""
    mixed, orders = tokens * how.multipliers[0], len(how.multipliers) - 1
    heads, start, found = len(how.sizes) // orders, 0, []
    for order in range(orders):
        mixed = mixed ^ (near[..., order] * how.multipliers[order + 1])
        for size in how.sizes[order * heads : (order + 1) * heads]:
            found.append(mixed % size + start)
            start += size
    return torch.stack(found, -1)


def add_ngrams_to_streams(
    weights: Mapping[str, Any],
    x: Tensor,
    rows: Tensor,
    segment_ids: Tensor,
    state: tuple[Tensor, Tensor] | None = None,
    *,
    step: int,
    eps: float,
    kernel: Any = "auto",
) -> tuple[Tensor, Tensor]:
    """(streams x [B, S, n, D] with embeddings of n-grams, the state of the convolution [B, (K - 1) step, n D]).

    weights: "table" [rows, E / heads], "key_proj" [n D, E], "value_proj" [D, E], "key_norm", "query_norm" and
    "conv_norm" [n D], "conv" [n D, 1, K]. rows: int64 [B, S, heads]. segment_ids: [B or 1, S]. state: that of the
    tokens before and the segment [B] of their last. step: d above. kernel: as for `short_conv`.
    """
    embedded = look_up(weights["table"], rows, "rows of n-grams").flatten(-2)
    keys = linear(embedded, weights["key_proj"]).unflatten(-1, x.shape[-2:])
    product = normed({"scale": weights["key_norm"]}, keys, eps=eps) * normed(
        {"scale": weights["query_norm"]}, x, eps=eps
    )
    total = pairwise_sum(product, -1).unsqueeze(-1) if rows_are_invariant() else product.sum(-1, keepdim=True)
    gate = total / x.shape[-1] ** 0.5
    gate = elementwise(torch.sigmoid, gate.abs().clamp(min=1e-6).sqrt() * gate.sign())
    values = gate * linear(embedded, weights["value_proj"]).unsqueeze(-2)
    read = normed({"scale": weights["conv_norm"]}, values, eps=eps).flatten(-2)
    convolved, after = stepped_conv(read, weights["conv"], segment_ids, state, step=step, kernel=kernel)
    return x + values + convolved.unflatten(-1, x.shape[-2:]), after


def stepped_conv(
    x: Tensor,
    weight: Any,
    segment_ids: Tensor,
    state: tuple[Tensor, Tensor] | None,
    *,
    step: int,
    kernel: Any,
) -> tuple[Tensor, Tensor]:
    """`short_conv` of x [B, S, C] with weight [C, 1, K], whose taps are `step` tokens apart, and a silu."""
    along_rows = getattr(weight, "along_rows", None)  # of ranks that hold pieces of the rows and convolve all of them
    if along_rows is not None:
        joined: tuple[Tensor, Tensor] = along_rows(stepped_conv, x, segment_ids, state, step=step, kernel=kernel)
        return joined
    tail, last = (None, None) if state is None else state
    how: dict[str, Any] = {"silu": True, "step": step, "kernel": kernel}
    return short_conv(x, weight[:, 0], None, segment_ids, tail, last, **how)

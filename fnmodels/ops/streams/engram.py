"""Engram, conditional memory that a layer adds to residual streams (arXiv 2601.07372; DeepSeek V4.1).

With compressed ids u of the tokens of a document, streams x [B, S, n, D], and the rows e_t of a token's n-grams:

    g_tj = sum over i of rms(x_tj)_i rms(key_j(e_t))_i a_ji b_ji / sqrt(D)
    y_tj = x_tj + sigmoid(sign(g_tj) sqrt(|g_tj|)) value(e_t)

The rows are those of `ngrams.xor_rows` but for what ends an n-gram: the begin of a document, and a token that is no
text, such as a picture's, whose id is -1 and whose streams stay as they are. What they hide counts as the id of
padding. Tokens whose texts normalize alike have one compressed id, by a table that a tokenizer makes.
"""

from collections.abc import Mapping, Sequence
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from fnmodels.ops.dtypes import upcast
from fnmodels.ops.embedding import look_up
from fnmodels.ops.invariant.rows import elementwise, pairwise_sum, rows_are_invariant
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm

from .ngrams import XorHash, is_prime, mixed_rows

_LEAST = 1e-6  # of what the gate takes the square root of


def engram_hashes(multipliers: Sequence[Sequence[int]], heads: int, rows: int, padding: int) -> list[XorHash]:
    """The hash of each table, with `heads` of each order of n-grams.

    The rows of all heads of all tables are different primes from `rows` on. padding: the compressed id of padding.
    multipliers: of each table, of a token and of those before it. In DeepSeek V4.1 those of layer l for a vocabulary of
    V compressed ids are 2 m + 1, m = numpy.random.default_rng(10007 l).integers(0, (2^63 - 1) // V // 2, n).
    """
    primes = (number for number in count(rows) if is_prime(number))
    return [XorHash(tuple(own), tuple(islice(primes, (len(own) - 1) * heads)), padding) for own in multipliers]


def engram_rows(ids: Tensor, preceding: Tensor, how: XorHash, padding: Tensor | None = None) -> Tensor:
    """The row of each token in the table for each head, int64 [B, S, heads].

    ids: int64 [B, S], compressed; -1 is a token that is no text. preceding: int64 [B, S, n - 1] of the same ids, of
    `fnmodels.inputs.segments.preceding_tokens`. padding: its compressed id in place of `how.end`, [1].
    """
    end = how.end if padding is None else padding
    hidden = torch.cat((ids.unsqueeze(-1), preceding), -1).lt(0).cumsum(-1) > 0
    near = preceding.where(~hidden[..., 1:], end)
    return mixed_rows(ids.where(~hidden[..., 0], end), near, how)


def compressed(tokens: Tensor, token_map: Tensor, count: int) -> Tensor:
    """The compressed ids of token ids, int64 of any shape; -1 stays.

    token_map: [V, 1], the compressed id of each token, floating so that a tree of parameters has gradients. count: of
    compressed ids; memory that was never filled may hold any number.
    """
    ids = token_map.flatten()[tokens.clamp(min=0)].nan_to_num().round().long().clamp(0, count - 1)
    return ids.where(tokens >= 0, -1)


def add_engram(
    weights: Mapping[str, Any], x: Tensor, rows: Tensor, is_text: Tensor | None = None, *, eps: float
) -> Tensor:
    """The streams x [B, S, n, D] with what the rows of n-grams, int64 [B, S, heads], add to them.

    weights: "table" [rows, E / heads], "key_proj" [n D, E], "value_proj" [D, E], "key_scale" and "query_scale" [n, D].
    is_text: bool [B, S]; None: all tokens are.
    """
    embedded = look_up(weights["table"], rows, "rows of n-grams").flatten(-2)
    keys = upcast(linear(embedded, weights["key_proj"])).unflatten(-1, x.shape[-2:])
    scale = upcast(weights["key_scale"]) * upcast(weights["query_scale"])
    product = rms_norm(upcast(x), None, eps=eps) * rms_norm(keys, None, eps=eps) * scale
    total = pairwise_sum(product, -1) if rows_are_invariant() else product.sum(-1)
    total = total * x.shape[-1] ** -0.5
    gate = elementwise(torch.sigmoid, total.abs().clamp(min=_LEAST).sqrt().copysign(total))
    gate = gate if is_text is None else gate.where(is_text.unsqueeze(-1), 0)
    values = upcast(linear(embedded, weights["value_proj"]))
    return (upcast(x) + gate.unsqueeze(-1) * values.unsqueeze(-2)).to(x.dtype)

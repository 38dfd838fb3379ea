"""Attention over depth (block attention residuals, arXiv 2603.15031): a sublayer reads earlier states of its token.

A stack is cut into blocks of layers. In place of one residual stream a token has the states that the blocks began with
and that of its own block, x_1 .. x_n. With a learned query w and h_i = x_i / rms(x_i)

    y = sum over i of softmax_i(w . h_i / sqrt(D)) h_i    (`attend_depth`, Inkling 2)
    y = sum over i of softmax_i(w . h_i) x_i              (`mix_depth`, Kimi K3)

It is computed in fp32 at least, and mixes no tokens.
"""

import torch
from torch import Tensor

from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise, softmax
from fnmodels.ops.linear import linear
from fnmodels.ops.norm import rms_norm

_EPS = 1e-6  # whatever the model's


def attend_depth(query: Tensor, blocks: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """What each of the queries [Q, D] reads of blocks [B, S, n, D] and x [B, S, D]: Q tensors [B, S, D], fp32."""
    normed = rms_norm(_states(blocks, x), None, eps=_EPS)
    weights = softmax(_scores(query, normed) / normed.shape[-1] ** 0.5)  # [B, S, Q, n + 1]
    return tuple(_mixed(of_query, normed) for of_query in weights.unbind(-2))


def mix_depth(query: Tensor, blocks: Tensor, x: Tensor, *, eps: float) -> Tensor:
    """What the query [D] reads of blocks [B, S, n, D] and x [B, S, D], whose norms it meets: [B, S, D], in x's dtype.

    eps: of these norms. The states themselves are mixed, and scores are not divided by sqrt(D).
    """
    states = _states(blocks, x)
    weights = softmax(_scores(query[None], rms_norm(states, None, eps=eps)))
    return _mixed(weights.squeeze(-2), states).to(x.dtype)


def _states(blocks: Tensor, x: Tensor) -> Tensor:
    """[B, S, n + 1, D], that of x last; in fp32 at least."""
    return upcast(torch.cat((blocks.to(x.dtype), x.unsqueeze(-2)), -2))


def _scores(query: Tensor, normed: Tensor) -> Tensor:
    """[B, S, Q, n + 1] of queries [Q, D] and states [B, S, n + 1, D]."""
    own = upcast(query).clone()  # the bits of a product with one row depend on where its memory begins, as in a file
    return linear(normed, own).mT


def _mixed(weights: Tensor, states: Tensor) -> Tensor:
    """The sum of states [B, S, n, D] by weights [B, S, n], in one order: with and without gradients the same bits."""
    total = weights[..., :1] * states[..., 0, :]
    for i in range(1, states.shape[-2]):
        total = total + weights[..., i : i + 1] * states[..., i, :]
    return total


def gate_message(weights: dict[str, Tensor], x: Tensor, message: Tensor, *, eps: float) -> Tensor:
    """(1 - f) x + g message, with f and g the tanh of maps of low rank of both norms; x, message [B, S, D].

    weights: "down_proj" [r, 2 D], "forget_proj" and "message_proj" [D, r], in whose dtypes the products are computed;
    all else is in fp32 at least.
    """
    x, message = upcast(x), upcast(message)
    read = torch.cat((rms_norm(x, None, eps=eps), rms_norm(message, None, eps=eps)), -1)
    narrow = linear(read.to(weights["down_proj"].dtype), weights["down_proj"])
    last = (weights[f"{name}_proj"] for name in ("forget", "message"))  # wider than the first where files keep them so
    forget, gain = (elementwise(torch.tanh, upcast(linear(narrow.to(weight.dtype), weight))) for weight in last)
    return (1 - forget) * x + gain * message

"""The recurrences of kernel="invariant": one token after the other, with sums in an order of their own.

Chunks begin at other tokens in other rows, and a matrix product adds in an order that depends on its size. Here each
token takes elementwise operations and `pairwise_sum`, so that its bits depend on the tokens of its document alone.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fnmodels.ops.cpu.recurrent.chunks import ChunkStep
from fnmodels.ops.dtypes import upcast
from fnmodels.ops.invariant.rows import elementwise, invariant_rows, pairwise_sum


def by_token(step: ChunkStep) -> ChunkStep:
    """`step`, which takes one token, as a step of a chunk."""
    return functools.partial(_chunk, step)


def _chunk(
    step: ChunkStep, state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    ys = []
    with invariant_rows(True):  # the backward pass, which computes the chunk again, is outside of the block's scope
        for token in zip(*(t.split(1, dim=1) for t in along), strict=True):
            y, state = step(state, token, constants)
            ys.append(y)
    return torch.cat(ys, dim=1), state


def delta_token(
    state: Tensor, along: tuple[Tensor, ...], _: tuple[Tensor, ...], *, normalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """A token of `delta_rule`: (o [B, 1, H, dv], state [B, H, dk, dv])."""
    q, k, v, g, beta, run, before = along
    heads, dtype = v.shape[2], v.dtype
    q, k = (_normalized(upcast(x), normalize) for x in (q, k))
    q, k, v, g, beta = (_of_heads(upcast(x), heads) for x in (q * scale, k, v, g, beta))
    decay = elementwise(torch.exp, g).view(*g.shape[:2], -1, 1)  # [B, H, dk or 1, 1]
    state = (state * decay).where((run == before)[..., None, None], 0)
    correction = beta[..., None] * (v - pairwise_sum(k[..., None] * state, -2))
    state = state + k[..., None] * correction[..., None, :]
    return pairwise_sum(q[..., None] * state, -2)[:, None].to(dtype), state


def two_keys_token(state: Tensor, along: tuple[Tensor, ...], _: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """A token of `two_key_rule`: (o [B, 1, H, dv], state [B, H, dk, dv])."""
    *tensors, run, before = along
    dtype = tensors[2].dtype
    r, k, v, g, a, b = (upcast(t)[:, 0] for t in tensors)
    state = state.where((run == before)[..., None, None], 0)
    read = pairwise_sum(a[..., None] * state, -2)
    state = elementwise(torch.exp, g)[..., None] * state
    state = state + b[..., None] * read[..., None, :] + k[..., None] * v[..., None, :]
    return pairwise_sum(r[..., None] * state, -2)[:, None].to(dtype), state


def ssd_token(state: Tensor, along: tuple[Tensor, ...], constants: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """A token of `ssd`: (y [B, 1, H, P], state [B, H, P, N])."""
    x, dt, B, C, run, before = along
    A, D = constants
    x, dt = upcast(x[:, 0]), dt[:, 0]
    B, C = (_of_heads(upcast(t), x.shape[1])[..., None, :] for t in (B, C))  # [rows, H, 1, N]
    state = (state * elementwise(torch.exp, dt * A)[..., None, None]).where((run == before)[..., None, None], 0)
    state = state + (dt[..., None] * x)[..., None] * B
    return (pairwise_sum(state * C, -1) + D[:, None] * x)[:, None], state


def _normalized(x: Tensor, normalize: bool) -> Tensor:
    return x * elementwise(torch.rsqrt, pairwise_sum(x.square(), -1) + 1e-6)[..., None] if normalize else x


def _of_heads(x: Tensor, heads: int) -> Tensor:
    """[B, 1, H, ...] -> [B, heads, ...], each of the H heads for heads / H following ones."""
    x = x[:, 0]
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)

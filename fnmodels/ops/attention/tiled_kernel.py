"""The maths of tiled causal attention: forward and backward on plain tensors."""

import math
from typing import Any

import torch
from torch import Tensor

from fnmodels.ops.torch_internals import MATRIX_TILES, SECOND_LEVEL_CACHE, softmax_backward

from .sdpa import sdpa_attention


def _widens(q: Tensor) -> bool:
    """Whether bf16 tiles are faster in fp32, see `ops.product_table`."""
    from fnmodels.ops import product_table  # here, for its import measures

    return q.dtype is torch.bfloat16 and product_table.WIDENS


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[B, S, N, H] -> [B, G, N/G, S, H], a view."""
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)


def _heads(x: Tensor) -> Tensor:
    """[B, S, G, H] -> [B G, S, H], contiguous."""
    return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])


def _rows(x: Tensor) -> Tensor:
    """A tile [B, G, N/G, rows, H] -> [B G, N/G rows, H]."""
    return x.flatten(2, 3).flatten(0, 1)


def _probabilities(q: Tensor, keys: Tensor, lo: int, future: Tensor) -> Tensor:
    """Probabilities of the tile that begins at `lo`: q [B G, N/G rows, H], keys [B G, H, hi] -> [B G, N/G rows, hi]."""
    scores = torch.bmm(q, keys)
    scores.unflatten(1, (-1, future.shape[0]))[..., lo:].masked_fill_(future, -torch.inf)
    return torch.softmax(scores, -1)


def tiles_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [B, S, N, H], k [B, S, G, H], v [B, S, G, Hv] -> [B, S, N, Hv]."""
    if q.dtype is torch.bfloat16 and MATRIX_TILES:  # which the fused kernel's forward pass uses
        return sdpa_attention(q, k, v, None, causal=True, scale=scale).contiguous()
    if _widens(q):
        return tiles_forward(q.float(), k.float(), v.float(), scale).to(q.dtype)
    (batch, length, heads, _), groups = q.shape, k.shape[2]
    q5, keys, values = _grouped(q, groups), _heads(k).mT, _heads(v)
    out = q.new_empty(batch, length, heads, v.shape[3])
    out5, size = _grouped(out, groups), _tile(q)
    future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    for lo in range(0, length, size):
        hi = min(lo + size, length)
        p = _probabilities(_rows(q5[:, :, :, lo:hi] * scale), keys[..., :hi], lo, future[: hi - lo, : hi - lo])
        out5[:, :, :, lo:hi] = torch.bmm(p, values[:, :hi]).view(batch, groups, -1, hi - lo, v.shape[3])
    return out


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Saves the inputs of `tiles_backward`: q, k, v and the scale."""
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def tiles_backward(q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), given grad_output [B, S, N, Hv]."""
    if _widens(q):
        dq, dk, dv = tiles_backward(q.float(), k.float(), v.float(), grad_output.float(), scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    (batch, length, _, width), groups = q.shape, k.shape[2]
    q5, grad_output5, keys, values = _grouped(q, groups), _grouped(grad_output, groups), _heads(k), _heads(v)
    wide = torch.promote_types(q.dtype, torch.float32)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    dk, dv = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
    dq5, size = _grouped(dq, groups), _tile(q)
    future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    for lo in range(0, length, size):
        hi = min(lo + size, length)
        tile, grad_tile = _rows(q5[:, :, :, lo:hi] * scale), _rows(grad_output5[:, :, :, lo:hi])
        p = _probabilities(tile, keys[:, :hi].mT, lo, future[: hi - lo, : hi - lo])
        # add_, for += on a slice copies it onto itself; in fp32; baddbmm_ would take the matrices one by one
        dv[:, :hi].add_(torch.bmm(p.mT, grad_tile))
        dp = torch.bmm(grad_tile, values[:, :hi].mT)
        ds = softmax_backward(dp, p, q.dtype)
        dk[:, :hi].add_(torch.bmm(ds.mT, tile))
        dq_tile = torch.bmm(ds, keys[:, :hi]).view(batch, groups, -1, hi - lo, width)
        torch.mul(dq_tile, scale, out=dq5[:, :, :, lo:hi])
    return dq, _unheads(dk, k), _unheads(dv, v)


def _unheads(grad: Tensor, like: Tensor) -> Tensor:
    """[B G, S, H] -> [B, S, G, H] in the dtype of `like`."""
    return grad.to(like.dtype).unflatten(0, (like.shape[0], -1)).transpose(1, 2)


# Bytes of one tile's scores, which should stay in the caches of two cores between the products, and most queries of a
# tile, by bytes per element. On a CPU with 2 MiB of second-level cache per core, tiles are up to 1.25 times (fp32) and
# 1.3 times (bf16) as fast as with 2 MiB of scores. Tiles of 64 are the fastest ones in fp32, larger ones in bf16.
_SCORES = 2 * SECOND_LEVEL_CACHE
_MOST = {2: 256, 4: 64}


def _tile(q: Tensor) -> int:
    """Queries of a tile: at most half of a row above 128, for what is above the diagonal is computed too."""
    batch, length, heads, _ = q.shape
    size = q.element_size()
    rows = _SCORES // max(1, batch * heads * length * size)
    return max(32, min(_MOST.get(size, 64), max(128, length // 2), 2 ** int(math.log2(max(1, rows)))))

"""The maths of tiled causal attention: forward and backward on plain tensors.

Row: train_step.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.torch_internals import MATRIX_TILES, SECOND_LEVEL_CACHE, softmax_backward

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes per element


def _widens(q: Tensor) -> bool:
    """Whether bf16 tiles are faster in fp32, see `ops.cpu.product_table`."""
    from fnmodels.ops.cpu import product_table  # here, for its import measures

    return q.dtype is torch.bfloat16 and product_table.WIDENS


def _by_position(x: Tensor, groups: int) -> Tensor:
    """[B, S, N, H] -> [B G, S N/G, H], in which the rows of a tile of positions follow each other; a view if it can."""
    return x.unflatten(2, (groups, -1)).transpose(1, 2).reshape(x.shape[0] * groups, -1, x.shape[3])


def _place(rows: Tensor, into: Tensor, groups: int) -> None:
    """Writes [B G, S N/G, H], in the layout of `_by_position`, to `into` [B, S, N, H]."""
    into = into.unflatten(2, (groups, -1)).transpose(1, 2)
    into.copy_(rows.view(into.shape))


def _part(x: Tensor, lo: int, hi: int) -> Tensor:
    """x[:, lo:hi], in bf16 contiguous: bmm would copy it in each product, and a transposed one ten times as slowly."""
    return x[:, lo:hi].contiguous() if x.dtype is torch.bfloat16 else x[:, lo:hi]


@dataclass(frozen=True)
class _Future:
    """The bits of -inf above the diagonal, and those that stay: integers [size heads, size] of the scores' width."""

    infinite: Tensor
    kept: Tensor

    @staticmethod
    def of_tile(size: int, heads: int, like: Tensor) -> "_Future":
        future = torch.ones(size, size, dtype=torch.bool, device=like.device).triu_(1).repeat_interleave(heads, 0)
        bits = _BITS[like.element_size()]
        infinite = torch.zeros(future.shape, dtype=like.dtype, device=like.device).masked_fill_(future, -torch.inf)
        return _Future(infinite.view(bits), (~future).to(bits).neg_())

    def hide_(self, corner: Tensor) -> None:
        """-inf above the diagonal of scores [B G, rows, positions], NaN included, in half of masked_fill's time."""
        bits = corner.view(self.kept.dtype)
        rows, columns = corner.shape[1:]
        bits.bitwise_and_(self.kept[:rows, :columns]).bitwise_or_(self.infinite[:rows, :columns])


def _probabilities(q: Tensor, keys: Tensor, lo: int, future: _Future) -> Tensor:
    """Probabilities of the positions from `lo`: q [B G, (hi - lo) N/G, H], keys [B G, hi, H] -> [..., hi]."""
    scores = torch.bmm(q, keys.mT)
    future.hide_(scores[..., lo:])
    return torch.softmax(scores, -1)


def tiles_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [B, S, N, H], k [B, S, G, H], v [B, S, G, Hv] -> [B, S, N, Hv]."""
    if q.dtype is torch.bfloat16 and MATRIX_TILES:  # which the fused kernel's forward pass uses
        return _fused(q, k, v, scale)
    if _widens(q):
        return tiles_forward(q.float(), k.float(), v.float(), scale).to(q.dtype)
    length, groups = k.shape[1:3]
    each, size = q.shape[2] // groups, _tile(q)
    rows, keys, values = (_by_position(t, groups) for t in (q * scale, k, v))
    out, future = q.new_empty(*q.shape[:3], v.shape[3]), _Future.of_tile(size, each, q)
    for lo in range(0, length, size):
        hi = min(lo + size, length)
        p = _probabilities(_part(rows, lo * each, hi * each), _part(keys, 0, hi), lo, future)
        _place(torch.bmm(p, values[:, :hi]), out[:, lo:hi], groups)
    return out


def _fused(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    width, grouped = v.shape[-1], q.shape[2] != k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in pad_to_equal_width(q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
    return out.transpose(1, 2)[..., :width].contiguous()


def pad_to_equal_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad the narrower of keys and values with zeros: the CPU's fused kernel (1.7x faster) needs equal widths."""
    more = q.shape[-1] - v.shape[-1]
    if not more or not q.is_cpu:
        return q, k, v
    return F.pad(q, (0, max(-more, 0))), F.pad(k, (0, max(-more, 0))), F.pad(v, (0, max(more, 0)))


def save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Saves the inputs of `tiles_backward`: q, k, v and the scale."""
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def tiles_backward(q: Tensor, k: Tensor, v: Tensor, grad_output: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), given grad_output [B, S, N, Hv]."""
    if _widens(q):
        dq, dk, dv = tiles_backward(q.float(), k.float(), v.float(), grad_output.float(), scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
    length, groups = k.shape[1:3]
    each, size = q.shape[2] // groups, _tile(q)
    rows, keys, values = (_by_position(t, groups) for t in (q * scale, k, v))
    grad_rows, future = _by_position(grad_output, groups), _Future.of_tile(size, each, q)
    dq, wide = q.new_empty(q.shape), torch.promote_types(q.dtype, torch.float32)
    dk, dv = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
    for lo in range(0, length, size):
        hi = min(lo + size, length)
        tile, grad_tile = (_part(t, lo * each, hi * each) for t in (rows, grad_rows))
        seen = _part(keys, 0, hi)
        p = _probabilities(tile, seen, lo, future)
        # add_, for += on a slice copies it onto itself; in fp32; baddbmm_ would take the matrices one by one
        dv[:, :hi].add_(torch.bmm(p.mT, grad_tile))
        dp = torch.bmm(grad_tile, _part(values, 0, hi).mT)
        ds = softmax_backward(dp, p, q.dtype)
        dk[:, :hi].add_(torch.bmm(ds.mT, tile))
        _place(torch.bmm(ds, seen), dq[:, lo:hi], groups)
    return dq.mul_(scale), _unheads(dk, k), _unheads(dv, v)


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

"""Attention of one query per row in compiled code without gradients, as in decoding.

The CPU's fused kernel is made for many queries. Inductor writes loops for what is below. A core waits for memory, and
for less where it reads the keys of several heads in turn; values are summed in blocks of keys, which stay in the cache
for all query heads.

Row: generate, compiled.
"""

import torch
from torch import Tensor

from fnmodels.ops.torch_internals import known_true

_BLOCK = 64  # keys
_VECTOR = 16  # fp32 elements of the widest registers


def is_one_query(q: Tensor) -> bool:
    """Whether `one_query_attention` computes this call. q [B, Q, N, H]."""
    return (
        torch.compiler.is_compiling()
        and not torch.is_grad_enabled()
        and q.is_cpu
        and q.dtype in (torch.float32, torch.bfloat16, torch.float16)  # the sums are in fp32
        and q.shape[1] == 1
    )


def one_query_attention(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None, *, scale: float) -> Tensor:
    """[B, 1, N, Hv] of q [B, 1, N, H], k [B, K, G, H], v [B, K, G, Hv], rounded once, from fp32.

    allowed: bool [B or 1, N or 1, 1, K] or None: all keys are seen. A query that sees none gives 0.
    """
    groups = k.shape[2]
    wide = _stored(q[:, 0].unflatten(1, (groups, -1)).float() * scale)  # [B, G, R, H] with R = N / G
    scores = _stored((wide[:, None] * k[:, :, :, None].float()).sum(-1)).permute(0, 2, 3, 1)  # [B, G, R, K]
    if allowed is not None:
        seen = allowed.transpose(1, 2)  # [B or 1, 1, N or 1, K]
        seen = seen if seen.shape[2] == 1 else seen[:, 0].unflatten(1, (groups, -1))
        scores = scores.masked_fill(~seen, -torch.inf)
    scores = _stored(scores)  # in the order of the sums over keys
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top.masked_fill(top == -torch.inf, 0)).exp()
    total = weights.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (_weighted(weights, v) / total).flatten(1, 2)[:, None].to(q.dtype)


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """[B, G, R, Hv], the sums over keys of v [B, K, G, Hv] with weights [B, G, R, K].

    They are sums of blocks where K is known to be a multiple: asking for the size of a graph would compile it anew.
    """
    if not known_true(v.shape[1] % _BLOCK == 0):
        return _summed(weights, v)
    by_block = weights.unflatten(-1, (-1, _BLOCK)).movedim(3, 1)  # [B, blocks, G, R, keys]
    return _stored(_summed(by_block, v.unflatten(1, (-1, _BLOCK)))).sum(1)


def _summed(weights: Tensor, v: Tensor) -> Tensor:
    """[..., G, R, Hv] of weights [..., G, R, K] and v [..., K, G, Hv].

    Parts of the width are sums of one loop over the keys, which therefore reads whole heads in the order of memory.
    """
    wide = v.transpose(-3, -2)[..., None, :, :].float()
    parts = wide.split(max(_VECTOR, v.shape[-1] // 8), -1)
    return torch.cat([(weights[..., None] * part).sum(-2) for part in parts], -1)


def _stored(x: Tensor) -> Tensor:
    """x in memory, in its order: Inductor would compute it wherever it is read."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())

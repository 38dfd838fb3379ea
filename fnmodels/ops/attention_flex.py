"""kernel="flex": FlexAttention (arXiv 2412.05496), compiled. On the CPU torch has its forward only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .first_order import sentence
from .norm import upcast


@functools.cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention compiled, made at the first use because importing the compiler takes seconds. Holds no tensor."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, block_mask: Any, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Shapes as in `ops.attention`. Raises NotImplementedError on the CPU where a gradient is asked for."""
    from torch.nn.attention import flex_attention as flex

    if q.is_cpu and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        raise NotImplementedError(
            'kernel="flex" has no backward on the CPU: use kernel="blocks" (with a layout) or "sdpa" to train there; '
            'kernel="math" supports every transform.'
        )

    def capped(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    run = flex.flex_attention if torch.compiler.is_compiling() else _compiled()
    try:
        out, aux = run(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            score_mod=None if softcap is None else capped,
            block_mask=block_mask,
            scale=scale,
            enable_gqa=q.shape[-2] != k.shape[-2],
            return_aux=flex.AuxRequest(lse=sinks is not None),
        )
    except NotImplementedError as error:
        raise NotImplementedError(sentence("flex")) from error
    if sinks is not None:  # the sink's share of the probability is taken from all keys alike
        out = out * torch.sigmoid(aux.lse - upcast(sinks)[:, None])[..., None].to(out.dtype)
    return out.transpose(1, 2)

"""kernel="flex": compiled FlexAttention (arXiv 2412.05496), on CUDA; on the CPU without gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fnmodels.ops.dtypes import upcast
from fnmodels.ops.torch_compilation import set_up_inductor

MIN_HEAD_DIM = 16  # of FlexAttention's CUDA kernels


@functools.cache
def _compiled() -> dict[bool | None, Callable[..., Any]]:
    """{dynamic: FlexAttention compiled}, on first use because importing the compiler takes seconds. Holds no tensor."""
    from torch.nn.attention.flex_attention import flex_attention

    set_up_inductor()
    return {dynamic: torch.compile(flex_attention, dynamic=dynamic) for dynamic in (None, False)}


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, block_mask: Any, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Shapes as in `ops.attention.select`. NotImplementedError on the CPU if gradients are needed."""
    from torch.nn.attention import flex_attention as flex

    if q.is_cpu:
        q, k, v = _on_the_cpu(q, k, v, sinks)
    value_width = v.shape[-1]
    if q.is_cuda:  # zero padding does not change scores; the output is truncated again
        q, k, v = (F.pad(t, (0, max(0, MIN_HEAD_DIM - t.shape[-1]))) for t in (q, k, v))
    run: Any = flex.flex_attention
    if not torch.compiler.is_compiling():  # on the CPU, the code of torch 2.13 for dynamic shapes does not compile
        run = _compiled()[False if q.is_cpu else None]
    out, aux = run(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=block_mask,
        scale=scale,
        enable_gqa=bool(q.shape[-2] != k.shape[-2]),
        return_aux=flex.AuxRequest(lse=sinks is not None),
    )
    if sinks is not None:  # the sink scales down the probabilities of all keys equally
        out = out * torch.sigmoid(aux.lse - upcast(sinks)[:, None])[..., None].to(out.dtype)
    return out.transpose(1, 2)[..., :value_width]


def _on_the_cpu(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) without gradients; an error for what torch's kernel cannot do there."""
    if _needs_grad(q, k, v):
        raise NotImplementedError(
            'kernel="flex" has no backward on the CPU: kernel="blocks" (with a layout) and "sdpa" train there, '
            'kernel="math" supports every transform.'
        )
    if sinks is not None:
        raise ValueError('kernel="flex" has no sinks on the CPU; "blocks" (with a layout), "sdpa", kernel="math" have.')
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f'kernel="flex" runs in fp32, fp16 and bf16 on the CPU, not in {q.dtype}; "blocks" (with a layout), '
            '"sdpa" and kernel="math" do.'
        )
    return q.detach(), k.detach(), v.detach()  # torch refuses what requires a gradient even under no_grad


def _needs_grad(*tensors: Tensor) -> bool:
    if torch.compiler.is_compiling():
        from fnmodels.ops.torch_internals import transforms  # here, for making it imports dynamo

        active = transforms()
        if active is None or "Grad" in active:  # requires_grad is not set on its inputs while dynamo traces it
            return True
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _capped(softcap: float) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_index: Tensor, kv_index: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod

"""`KERNELS`: every attention kernel as a record of what it reads, supports and runs on. Adding one is one record.

kernel    needs                     use
math      -                         every transform: jvp, Hessian products, second derivatives
sdpa      -                         fused; a dense mask unless the layout proves is_causal or no mask equivalent
blocks    Mask and layout           CPU and eager mode: packed documents, windows, chunks; memory linear in S
flex      Mask, BlockMask or choice CUDA; on the CPU without gradients
varlen    Mask and layout, CUDA     packed documents in fp16 or bf16
sparse    eager mode                a choice of keys: time and memory linear in the number of chosen keys
invariant Mask, eager mode          a token's bits depend on its document's tokens alone; first derivatives
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fnmodels.inputs.block_mask import to_block_mask
from fnmodels.inputs.convert import to_dense
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Mask, MaskLike
from fnmodels.inputs.rules import Causal
from fnmodels.ops.invariant.attention import Tiles, invariant_attention, plan_tiles
from fnmodels.options import Tap

from .block_sparse import Plan, blocks_attention, plan_blocks
from .choice import Choice, every_key
from .flex import flex_attention
from .math import math_attention
from .relative_bias import Bias
from .sdpa import ByIndex, by_index, sdpa_attention
from .sparse import sparse_attention
from .varlen import ByDocument, by_document, varlen_attention, varlen_window

HALF = (torch.float16, torch.bfloat16)


class Scoring(NamedTuple):
    """Parameters of the map from products of queries and keys to weights; see `ops.attention.select.attention`."""

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Bias | None = None
    tap: Tap | None = None


@dataclass(frozen=True)
class AttentionKernel:
    """One kernel.

    Attributes:
        run: (q, k, v, form of the mask, scoring) -> [B, Q, N, Hv]; shapes as in `ops.attention.select.attention`.
        plan: (mask, layout, device) -> the form of the mask that `run` reads; made once for all layers.
        needs_layout: whether `plan` reads a Mask and a layout, and neither other masks nor None.
        form: the type of that form, where only this kernel reads it.
        accepts: the changes of scores that it computes: softcap, sinks, bias, tap.
        refusals: {change: the sentence for a call that has it}, where naming other kernels takes more than a list.
        supports: transforms beside one backward pass: "vmap", and "all" for jvp and second derivatives too.
        guarded: whether `run` itself refuses the other transforms, by `autograd_guard.guarded`.
        devices, dtypes: where it runs; None for any.
    """

    run: Callable[[Tensor, Tensor, Tensor, Any, Scoring], Tensor]
    plan: Callable[[Any, Any, torch.device | str], Any]
    needs_layout: bool = False
    form: type | None = None
    accepts: frozenset[str] = frozenset()
    refusals: Mapping[str, str] = field(default_factory=dict)
    supports: frozenset[str] = frozenset()
    guarded: bool = False
    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None


def _math(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, s: Scoring) -> Tensor:
    bias = None if s.bias is None else s.bias.dense()
    return math_attention(q, k, v, allowed, scale=s.scale, softcap=s.softcap, sinks=s.sinks, bias=bias, tap=s.tap)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, form: Tensor | ByIndex, s: Scoring) -> Tensor:
    causal, allowed = (isinstance(form.rule, Causal), None) if isinstance(form, ByIndex) else (False, form)
    bias = None if s.bias is None else s.bias.dense()
    return sdpa_attention(q, k, v, allowed, causal=causal, scale=s.scale, sinks=s.sinks, bias=bias)


def _blocks(q: Tensor, k: Tensor, v: Tensor, plan: Plan, s: Scoring) -> Tensor:
    return blocks_attention(q, k, v, plan, scale=s.scale, softcap=s.softcap, sinks=s.sinks, bias=s.bias)


def _flex(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, s: Scoring) -> Tensor:
    return flex_attention(q, k, v, block_mask, scale=s.scale, softcap=s.softcap, sinks=s.sinks)


def _varlen(q: Tensor, k: Tensor, v: Tensor, documents: ByDocument, s: Scoring) -> Tensor:
    return varlen_attention(q, k, v, documents, scale=s.scale)


def _sparse(q: Tensor, k: Tensor, v: Tensor, choice: Choice, s: Scoring) -> Tensor:
    return sparse_attention(q, k, v, choice, scale=s.scale, softcap=s.softcap, sinks=s.sinks)


def _invariant(q: Tensor, k: Tensor, v: Tensor, plan: Tiles, s: Scoring) -> Tensor:
    return invariant_attention(q, k, v, plan, scale=s.scale, softcap=s.softcap, sinks=s.sinks)


def _plan_sdpa(mask: MaskLike, layout: Layout | None, device: Any) -> Any:
    rule = by_index(mask, layout)
    return to_dense(mask) if rule is None else ByIndex(rule)


def _plan_varlen(mask: Mask, layout: Layout, device: Any) -> ByDocument:
    window = varlen_window(mask.rule)
    if window is None:
        raise ValueError(f'kernel="varlen" knows causality and windows, not {mask.rule}; kernel="flex" does.')
    return by_document(layout, window, device)


_VARLEN_SCORES = 'kernel="varlen" has no softcap and no sinks; kernel="flex" has them.'

KERNELS: Mapping[str, AttentionKernel] = {
    "math": AttentionKernel(
        run=_math,
        plan=lambda mask, layout, device: to_dense(mask),
        accepts=frozenset({"softcap", "sinks", "bias", "tap"}),
        supports=frozenset({"vmap", "all"}),
    ),
    "sdpa": AttentionKernel(
        run=_sdpa,
        plan=_plan_sdpa,
        form=ByIndex,
        accepts=frozenset({"sinks", "bias"}),
        refusals={
            "softcap": 'kernel="sdpa" has no softcap; "blocks" (with a layout), "flex" and kernel="math" have it.'
        },
        supports=frozenset({"vmap"}),
        guarded=True,
    ),
    "blocks": AttentionKernel(
        run=_blocks,
        plan=lambda mask, layout, device: plan_blocks(mask, layout),
        needs_layout=True,
        form=Plan,
        accepts=frozenset({"softcap", "sinks", "bias"}),
        supports=frozenset({"vmap"}),
    ),
    "flex": AttentionKernel(
        run=_flex,
        plan=lambda mask, layout, device: to_block_mask(mask),
        accepts=frozenset({"softcap", "sinks"}),
    ),
    "varlen": AttentionKernel(
        run=_varlen,
        plan=_plan_varlen,
        needs_layout=True,
        form=ByDocument,
        refusals={"softcap": _VARLEN_SCORES, "sinks": _VARLEN_SCORES},
        devices=("cuda",),
        dtypes=HALF,
    ),
    "sparse": AttentionKernel(
        run=_sparse,
        plan=lambda mask, layout, device: every_key(to_dense(mask)),
        form=Choice,
        accepts=frozenset({"softcap", "sinks"}),
        supports=frozenset({"vmap"}),
    ),
    "invariant": AttentionKernel(
        run=_invariant,
        plan=lambda mask, layout, device: plan_tiles(mask),
        form=Tiles,
        accepts=frozenset({"softcap", "sinks"}),
        supports=frozenset({"vmap"}),
    ),
}
BY_FORM = {kernel.form: name for name, kernel in KERNELS.items() if kernel.form is not None}
FORMS = tuple(BY_FORM)


def accepted_by(kernel: Any) -> frozenset[str]:
    """The changes of scores that the kernel of this name computes; none for "auto", functions and unknown names."""
    return KERNELS[kernel].accepts if isinstance(kernel, str) and kernel in KERNELS else frozenset()


def check_scoring(name: str, scoring: Scoring) -> None:
    """ValueError for changes of the scores that this kernel, or all kernels, do not compute."""
    kernel = KERNELS[name]
    for change, sentence in kernel.refusals.items():
        if getattr(scoring, change) is not None:
            raise ValueError(sentence)
    if scoring.bias is None:
        if scoring.sinks is not None and scoring.sinks.ndim != 1:
            raise ValueError("Sinks of each token [B, Q, N] are for attention with a bias of scores; others are [N].")
        return
    if "bias" not in kernel.accepts:
        raise ValueError(
            f'kernel="{name}" has no relative position bias; "auto", "sdpa", "blocks" (with a layout) and '
            'kernel="math" have it.'
        )
    if scoring.softcap is not None:
        raise ValueError("No kernel has a relative position bias together with a softcap.")


def check_device(name: str, q: Tensor) -> None:
    """ValueError for a device and dtype that this kernel does not run on."""
    kernel = KERNELS[name]
    wrong_device = kernel.devices is not None and q.device.type not in kernel.devices
    if wrong_device or (kernel.dtypes is not None and q.dtype not in kernel.dtypes):
        raise ValueError(
            f'kernel="{name}" runs in fp16 and bf16 on CUDA, not in {q.dtype} on {q.device.type}; '
            'kernel="blocks" does the same work there.'
        )


def check_has_layout(kernel: str, mask: MaskLike, layout: Layout | None) -> None:
    """ValueError for a call without the rules and document ranges that this kernel reads."""
    if not KERNELS[kernel].needs_layout:
        return
    if not isinstance(mask, Mask):
        raise ValueError(f'kernel="{kernel}" reads rules: give it a fnmodels.inputs.Mask, or take kernel="sdpa".')
    if layout is None:
        raise ValueError(
            f'kernel="{kernel}" needs the document ranges: pass layout=fnmodels.layout(masks), '
            'or take kernel="sdpa", which needs none. (Documents that are not contiguous and in order have no layout.)'
        )

"""Scaled dot-product attention (arXiv 1706.03762): one function, `attention`, and the choice of its kernel.

q [B, Q, N, H], k [B, K, G, H], v [B, K, G, Hv] with N a multiple of G (grouped queries, arXiv 2305.13245).
The result is [B, Q, N, Hv]; a query that sees no key gives output 0 and gradient 0. `ops.attention.kernels` lists the
kernels; "auto" is one of them, see `explain_kernel`.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.block_mask import is_block_mask
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Mask, MaskLike
from fnmodels.inputs.rules import Causal
from fnmodels.ops.autograd_guard import first_order
from fnmodels.options import Kernel, Tap

from .checks import SHORT, check_layout, check_shapes, layout_at_hand
from .choice import READ_ONCE, Choice
from .choice_tiles import choice_block_mask
from .kernels import BY_FORM, FORMS, HALF, KERNELS, Scoring, accepted_by, check_device, check_has_layout, check_scoring
from .relative_bias import Bias
from .sdpa import ByIndex, by_index, sdpa_attention
from .varlen import varlen_window


@dataclass(frozen=True)
class Asks:
    """The changes of the scores that a call of attention requires of a kernel."""

    softcap: bool = False
    sinks: bool = False
    bias: bool = False


_PLAIN = Asks()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike,
    *,
    kernel: Kernel = "auto",
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    layout: Layout | None = None,
    bias: Bias | None = None,
    tap: Tap | None = None,
) -> Tensor:
    """softmax(scale q k^T + bias, masked) v.

    mask: `Mask`, BlockMask, bool [B or 1, N or 1, Q, K] with True where a query may attend, a `Choice` of keys, or the
    result of `materialize`. softcap c replaces scores s by c tanh(s / c) before the mask. sinks [N]: an extra logit per
    head that takes probability but has no value (gpt-oss). layout: `fnmodels.layout(masks)`. kernel: see `KERNELS`,
    `Kernel`.
    bias: for "math", "sdpa" and "blocks", and without softcap; a function of your own gets it as a keyword. Beside one
    sinks may be of each token, [B, Q, N].
    tap: shows scores and weights, see `math_attention`; for kernel="math" only.
    ValueError for a mask or option that the kernel does not support, NotImplementedError for a transform that it does
    not support; both name a kernel that does.
    """
    if tap is not None and "tap" not in accepted_by(kernel):
        raise ValueError(
            f"attention.scores and attention.pattern exist where attention is written out, and kernel={kernel!r} does "
            'not: take kernel="math".'
        )
    if callable(kernel):
        more = {} if bias is None else {"bias": bias}
        return kernel(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, layout=layout, **more)
    if isinstance(mask, Choice) and (kernel != "sparse" and not (kernel == "auto" and _gathers(mask, q, k, v, bias))):
        mask = choice_block_mask(mask, q.shape[2]) if kernel == "flex" else _dense(mask, q.shape[2])
    asks = _PLAIN
    if softcap is not None or sinks is not None or bias is not None:
        asks = Asks(softcap is not None, sinks is not None, bias is not None)
    ready = BY_FORM.get(type(mask)) if kernel == "auto" else None  # the kernel that the mask was made ready for
    if asks is _PLAIN and isinstance(mask, ByIndex) and ready is not None:  # the usual call of small models
        check_shapes(q, k, v, mask, mask)
        return sdpa_attention(q, k, v, None, causal=type(mask.rule) is Causal, scale=scale)
    if ready is not None:
        name, form = ready, mask
    else:
        name = kernel
        if kernel == "auto":
            name, _ = _choose(mask, layout, q.device.type, q.dtype, asks, torch.compiler.is_compiling())
        form = materialize(mask, name, layout, device=q.device)
    scoring = Scoring(scale, softcap, sinks, bias, tap)
    if asks is not _PLAIN:
        check_scoring(name, scoring)
    check_shapes(q, k, v, mask, form)
    chosen = KERNELS[name]
    if chosen.devices is not None or chosen.dtypes is not None:
        check_device(name, q)
    if not (chosen.guarded or "all" in chosen.supports):
        shared = v is k  # keys that are their own values, which a kernel may read once
        given = (q, k, v) if sinks is None else (q, k, v, sinks)
        q, k, v, *of_heads = first_order(name, *given, vmap="vmap" in chosen.supports)
        v = k if shared else v
        if of_heads:
            scoring = scoring._replace(sinks=of_heads[0])
    return chosen.run(q, k, v, form, scoring)


def _dense(choice: Choice, heads: int) -> Tensor:
    """bool [B or 1, 1 or N, Q, K] of N = `heads` of queries; 1 where all share a choice."""
    mask = choice.dense()
    return mask if mask.shape[1] == 1 else mask.repeat_interleave(heads // mask.shape[1], dim=1)


def _gathers(choice: Choice, q: Tensor, k: Tensor, v: Tensor, bias: Bias | None) -> bool:
    """Whether "auto" gathers the chosen keys instead of masking the others."""
    if bias is not None or torch.compiler.is_compiling():
        return False
    return choice.pays(q.shape[2], k.shape[2], cost=READ_ONCE if v is k else 1.0)


def materialize(
    mask: MaskLike,
    kernel: Kernel,
    layout: Layout | None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    asks: Asks = _PLAIN,
    checked: bool = False,
) -> Any:
    """The mask in the form that the kernel reads, made once for all layers; such a form is returned unchanged.

    device, dtype, asks: those of the attention calls, for "auto". checked: the layout is known to be that of the mask.
    ValueError for an unknown kernel and for the layout of another batch.
    """
    if callable(kernel):
        return mask
    if kernel != "auto" and kernel not in KERNELS:
        raise ValueError(
            f"The kernel {kernel!r} is unknown; known are auto, {', '.join(KERNELS)}, and a function of your own "
            "(q, k, v, mask, *, scale, softcap, sinks, layout) -> [B, Q, N, Hv]."
        )
    if isinstance(mask, FORMS):
        return mask
    if isinstance(mask, Mask) and layout is not None and not checked:
        check_layout(mask, layout)
    if kernel == "auto":
        kernel, _ = _choose(mask, layout, torch.device(device).type, dtype, asks, torch.compiler.is_compiling())
    chosen = KERNELS[kernel]
    if chosen.needs_layout:
        check_has_layout(kernel, mask, layout)
    return chosen.plan(mask, layout, device)


def explain_kernel(
    mask: MaskLike,
    *,
    layout: Layout | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    compiled: bool = False,
) -> tuple[str, str]:
    """The kernel that kernel="auto" chooses for a mask and layout, and why.

    Args:
        mask: The mask of a kind of layer.
        layout: The document ranges of the batch; None: those that `forward` finds in eager mode of masks on the host.
        device: Of the tensors.
        dtype: Of queries, keys and values.
        softcap: The soft-cap of scores; None: none.
        sinks: The heads' sinks [N]; None: none.
        compiled: Whether `forward` runs inside torch.compile. False for compiled blocks (compile="block"), whose kernel
            is chosen before, in eager mode.

    Returns:
        (kernel, reason).
    """
    kind = torch.device(device).type
    if layout is None and isinstance(mask, Mask) and kind == "cpu" and not compiled:
        layout = layout_at_hand(mask)
    return _choose(mask, layout, kind, dtype, Asks(softcap is not None, sinks is not None), compiled)


def _choose(
    mask: MaskLike, layout: Layout | None, device: str, dtype: torch.dtype, asks: Asks, compiled: bool
) -> tuple[str, str]:
    if (ready := BY_FORM.get(type(mask))) is not None:
        return ready, "the mask was made ready for it"
    cuda = device == "cuda"
    if cuda and asks.bias:
        return "sdpa", "a relative position bias: one fused call that reads it"
    if cuda and is_block_mask(mask):
        return "flex", "a BlockMask is its form of a mask"
    if not isinstance(mask, Mask) or layout is None:
        why = "no layout gives the document ranges" if isinstance(mask, Mask) else "the mask holds no rule"
        if asks.softcap:
            return "math", f"softcap, and {why}: the scores are written out"
        return "sdpa", f"{why}: one fused call with a dense mask"
    plain = by_index(mask, layout) is not None and not asks.softcap
    short = layout.length <= SHORT and dtype in (torch.float32, torch.float64) and not (asks.sinks or asks.bias)
    if plain and (cuda or compiled or short):
        return "sdpa", "every row is one document, and its rule is plain causality or none: a fused call without a mask"
    if not cuda:
        return "blocks", "the layout and the rule say which parts of the mask are empty"
    if varlen_window(mask.rule) is not None and dtype in HALF and not (asks.softcap or asks.sinks):
        return "varlen", "documents one after another under causality or a window, in half precision"
    return "flex", "a rule, or a change of the scores, that only FlexAttention fuses on this device"

"""Scaled dot-product attention (arXiv 1706.03762): one function, `attention`, and the selection of its kernel.

q [B, Q, N, H], k [B, K, G, H], v [B, K, G, Hv] with N a multiple of G (grouped queries, arXiv 2305.13245).
The result is [B, Q, N, Hv]; a query that sees no key gives output 0 and gradient 0.

    kernel    needs                     use
    math      -                         every transform: jvp, Hessian products, second derivatives
    sdpa      -                         fused; a dense mask unless the layout proves is_causal or no mask equivalent
    blocks    Mask and layout           CPU and eager mode: packed documents, windows, chunks; memory linear in S
    flex      Mask or BlockMask         CUDA; on the CPU without gradients
    varlen    Mask and layout, CUDA     packed documents in fp16 or bf16
    invariant Mask, eager mode          a token's bits depend on its document's tokens alone; first derivatives
    auto      -                         one of them, see `explain_kernel`
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.block_mask import is_block_mask, to_block_mask
from fnmodels.inputs.convert import shape_of, to_dense
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.layout import layout as layout_of
from fnmodels.inputs.mask import Mask, MaskLike
from fnmodels.inputs.rules import Causal, Everything, Rule, simplify
from fnmodels.inputs.values import has_values, unwrapped
from fnmodels.ops.autograd_guard import first_order
from fnmodels.ops.invariant.attention import Tiles, invariant_attention, plan_tiles
from fnmodels.ops.torch_internals import undisturbed
from fnmodels.options import Kernel, Tap

from .block_sparse import Plan, blocks_attention, plan_blocks
from .flex import flex_attention
from .math import math_attention
from .relative_bias import RelativeBias
from .sdpa import sdpa_attention
from .varlen import ByDocument, by_document, varlen_attention, varlen_window

KERNELS = ("auto", "math", "sdpa", "blocks", "flex", "varlen", "invariant")
SHORT = 256  # tokens up to which the fused call on a CPU is as fast as blocks for rows of one document


@tree.pytree
@dataclass(frozen=True)
class ByIndex:
    """The mask form of "sdpa" for rows of one full document: `Causal()` by index, or `Everything()`."""

    rule: Rule = tree.static()


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
    bias: RelativeBias | None = None,
    tap: Tap | None = None,
) -> Tensor:
    """softmax(scale q k^T + bias, masked) v.

    mask: `Mask`, BlockMask, bool [B or 1, N or 1, Q, K] with True where a query may attend, or the result of
    `materialize`. softcap c replaces scores s by c tanh(s / c) before the mask. sinks [N]: an extra logit per head that
    takes probability but has no value (gpt-oss). layout: `fnmodels.layout(masks)`. kernel: see KERNELS and `Kernel`.
    bias: for "math", "sdpa" and "blocks", and without softcap and sinks; a function of your own gets it as a keyword.
    tap: shows scores and weights, see `math_attention`; for kernel="math" only.
    ValueError for a mask or option that the kernel does not support, NotImplementedError for a transform that it does
    not support; both name a kernel that does.
    """
    if tap is not None and kernel != "math":
        raise ValueError(
            f"attention.scores and attention.pattern exist where attention is written out, and kernel={kernel!r} does "
            'not: take kernel="math".'
        )
    if callable(kernel):
        more = {} if bias is None else {"bias": bias}
        return kernel(q, k, v, mask, scale=scale, softcap=softcap, sinks=sinks, layout=layout, **more)
    if kernel == "auto":
        compiled = torch.compiler.is_compiling()
        asks = Asks(softcap is not None, sinks is not None, bias is not None)
        kernel, _ = _choose(mask, layout, q.device.type, q.dtype, asks, compiled)
    if bias is not None:
        _check_bias(kernel, softcap, sinks)
    form = materialize(mask, kernel, layout, device=q.device)
    _check_shapes(q, k, v, form if isinstance(form, Plan | Tiles) else mask)
    if kernel == "math":
        added = None if bias is None else bias.dense()
        return math_attention(q, k, v, form, scale=scale, softcap=softcap, sinks=sinks, bias=added, tap=tap)
    if kernel == "varlen":
        return _varlen(q, k, v, form, scale, softcap, sinks)
    q, k, v = first_order(kernel, q, k, v, vmap=kernel != "flex")
    if kernel == "sdpa":
        if softcap is not None:
            raise ValueError(
                'kernel="sdpa" has no softcap; "blocks" (with a layout), "flex" and kernel="math" have it.'
            )
        rule, allowed = (form.rule, None) if isinstance(form, ByIndex) else (None, form)
        added = None if bias is None else bias.dense()
        return sdpa_attention(q, k, v, allowed, causal=rule == Causal(), scale=scale, sinks=sinks, bias=added)
    if kernel == "invariant":
        return invariant_attention(q, k, v, form, scale=scale, softcap=softcap, sinks=sinks)
    if kernel == "blocks":
        return blocks_attention(q, k, v, form, scale=scale, softcap=softcap, sinks=sinks, bias=bias)
    return flex_attention(q, k, v, form, scale=scale, softcap=softcap, sinks=sinks)


def _check_bias(kernel: str, softcap: float | None, sinks: Tensor | None) -> None:
    if kernel not in ("math", "sdpa", "blocks"):
        raise ValueError(
            f'kernel="{kernel}" has no relative position bias; "auto", "sdpa", "blocks" (with a layout) and '
            'kernel="math" have it.'
        )
    if softcap is not None or sinks is not None:
        raise ValueError("No kernel has a relative position bias together with a softcap or with sinks.")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> None:
    """ValueError for shapes that a kernel would silently broadcast or truncate."""
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q is {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: these are [B, Q, N, H], [B, K, G, H] and "
            "[B, K, G, Hv]."
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads and k has {k.shape[2]}: groups of queries share a head of keys, so that their "
            "number must divide."
        )
    (batch, queries, heads), keys = q.shape[:3], k.shape[1]
    if isinstance(mask, ByIndex) and mask.rule != Everything() and queries != keys:
        raise ValueError(f"The mask was made ready for as many queries as keys, not for {queries} and {keys}.")
    if isinstance(mask, Plan | ByIndex | ByDocument | Tiles):
        return  # a plan is checked where it is used
    rows, per_head, *seen = shape_of(mask)
    if seen[0] != queries or seen[1] != keys or (rows != batch and rows != 1) or (per_head != heads and per_head != 1):
        raise ValueError(
            f"The mask is {[rows, per_head, *seen]}, but q and k need [{batch}, {heads}, {queries}, {keys}], of which "
            "the first two may be 1: one for all rows, or heads. Queries and keys are never broadcast."
        )


def materialize(
    mask: MaskLike,
    kernel: Kernel,
    layout: Layout | None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    softcap: float | None = None,
    sinks: bool = False,
    bias: bool = False,
) -> Any:
    """The mask in the form that the kernel reads, made once for all layers; such a form is returned unchanged.

    device, dtype, softcap, sinks, bias: those of the attention calls, for "auto". ValueError for an unknown kernel and
    for the layout of another batch.
    """
    if callable(kernel):
        return mask
    if kernel not in KERNELS:
        raise ValueError(
            f"The kernel {kernel!r} is unknown; known are {', '.join(KERNELS)}, and a function of your own "
            "(q, k, v, mask, *, scale, softcap, sinks, layout) -> [B, Q, N, Hv]."
        )
    if isinstance(mask, Plan | ByIndex | ByDocument | Tiles):
        return mask
    if isinstance(mask, Mask) and layout is not None:
        lengths = (mask.q_positions.shape[1], mask.kv_positions.shape[1])
        if lengths != (layout.length, layout.length):
            raise ValueError(
                f"The layout describes rows of {layout.length} tokens, the mask {lengths[0]} queries and "
                f"{lengths[1]} keys: make it of this batch, or leave it out."
            )
        _check_documents(mask, layout)
    if kernel == "auto":
        compiled = torch.compiler.is_compiling()
        asks = Asks(softcap is not None, sinks, bias)
        kernel, _ = _choose(mask, layout, torch.device(device).type, dtype, asks, compiled)
    if kernel == "blocks":
        return plan_blocks(*_with_layout(mask, layout, kernel))
    if kernel == "invariant":
        return plan_tiles(mask)
    if kernel == "flex":
        return to_block_mask(mask)
    if kernel == "varlen":
        mask, layout = _with_layout(mask, layout, kernel)
        window = varlen_window(mask.rule)
        if window is None:
            raise ValueError(f'kernel="varlen" knows causality and windows, not {mask.rule}; kernel="flex" does.')
        return by_document(layout, window, device)
    rule = by_index(mask, layout) if kernel == "sdpa" else None
    return to_dense(mask) if rule is None else ByIndex(rule)


def _check_documents(mask: Mask, layout: Layout) -> None:
    """ValueError if the layout is not that of the mask, checked where values can be read without a device sync.

    Not checked in traced graphs and under vmap, where a tensor has no value or many.
    """
    if torch.compiler.is_compiling():
        return
    mask = tree.map(unwrapped, mask)
    if not all(has_values(t) and t.is_cpu for t in tree.leaves(mask)):
        return
    if not undisturbed(_describes, layout, mask):
        raise ValueError(
            "The layout describes other documents than the mask: make it of this batch in this order, "
            "fnmodels.layout(masks), or leave it out."
        )


def _describes(layout: Layout, mask: Mask) -> bool:
    """Whether the layout is that of the mask, by a few comparisons for rows of one document."""
    positions, segments = mask.q_positions, mask.q_segments
    if not layout.plain or positions is not mask.kv_positions or segments is not mask.kv_segments:
        return layout_of({"": mask}) == layout
    rows, first = len(layout.rows), segments[:, :1]
    want = torch.tensor(layout.firsts) + torch.arange(layout.length)
    if (positions.shape[0], segments.shape[0]) != (rows, rows):
        return layout_of({"": mask}) == layout
    return torch.equal(positions, want) and bool(((segments == first) & (first > 0)).all())


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
    """(kernel, reason): the kernel that kernel="auto" chooses for this mask and layout.

    compiled: True for a `forward` inside torch.compile. Not for compiled blocks (compile="block"), whose kernel is
    chosen before, in eager mode.
    """
    kind = torch.device(device).type
    return _choose(mask, layout, kind, dtype, Asks(softcap is not None, sinks is not None), compiled)


@dataclass(frozen=True)
class Asks:
    """Which changes of the scores a call of attention has."""

    softcap: bool = False
    sinks: bool = False
    bias: bool = False


def _choose(
    mask: MaskLike, layout: Layout | None, device: str, dtype: torch.dtype, asks: Asks, compiled: bool
) -> tuple[str, str]:
    for form, kernel in ((Plan, "blocks"), (ByIndex, "sdpa"), (ByDocument, "varlen")):
        if isinstance(mask, form):
            return kernel, "the mask was made ready for it"
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
    if (
        varlen_window(mask.rule) is not None
        and dtype in (torch.float16, torch.bfloat16)
        and not (asks.softcap or asks.sinks)
    ):
        return "varlen", "documents one after another under causality or a window, in half precision"
    return "flex", "a rule, or a change of the scores, that only FlexAttention fuses on this device"


def by_index(mask: MaskLike, layout: Layout | None) -> Rule | None:
    """`Causal()` if the mask equals is_causal over indices, `Everything()` if all keys are visible; else None."""
    if not isinstance(mask, Mask) or layout is None or not layout.plain:
        return None
    spans = [(first, first + layout.length - 1) for (first,) in layout.firsts]
    rules = [simplify(mask.rule, span, span) for span in spans]
    plain = rules[0] in (Causal(), Everything()) and all(rule == rules[0] for rule in rules)
    return rules[0] if plain else None


def _with_layout(mask: MaskLike, layout: Layout | None, kernel: str) -> tuple[Mask, Layout]:
    if not isinstance(mask, Mask):
        raise ValueError(f'kernel="{kernel}" reads rules: give it a fnmodels.Mask, or take kernel="sdpa".')
    if layout is None:
        raise ValueError(
            f'kernel="{kernel}" needs the document ranges: pass layout=fnmodels.layout(masks), '
            'or take kernel="sdpa", which needs none. (Documents that are not contiguous and in order have no layout.)'
        )
    return mask, layout


def _varlen(
    q: Tensor, k: Tensor, v: Tensor, documents: ByDocument, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    if softcap is not None or sinks is not None:
        raise ValueError('kernel="varlen" has no softcap and no sinks; kernel="flex" has them.')
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(
            f'kernel="varlen" runs in fp16 and bf16 on CUDA, not in {q.dtype} on {q.device.type}; '
            'kernel="blocks" does the same work there.'
        )
    q, k, v = first_order("varlen", q, k, v, vmap=False)
    return varlen_attention(q, k, v, documents, scale=scale)

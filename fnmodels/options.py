"""How a forward pass runs, never what it computes: its options, and the types of what they hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

from torch import Tensor

from fnmodels.inputs.layout import Layout

Block = Callable[..., tuple[Tensor, dict[str, Tensor]]]


LayerFn = Callable[[Block], Block]


# One of KERNELS, or a function of your own (one that fetches the keys of other ranks, say), which is called as
# kernel(q, k, v, mask, scale=, softcap=, sinks=, layout=) with the mask as it was given to `forward`.
Kernel = str | Callable[..., Tensor]


# A function of the signature that `fnmodels.ops.moe.experts` describes.
Experts = Callable[..., Tensor]


class ForwardKwargs(TypedDict, total=False):
    """The keywords of public functions that run layers; each is a field of `ForwardOptions`."""

    kernel: Kernel
    layout: Layout | None
    layer_fn: LayerFn | None
    experts: str | Experts
    context: Callable[..., Any] | None


@dataclass(frozen=True)
class ForwardOptions:
    """How layers run. Hashable, so that blocks bound with equal options are compiled once.

    kernel: how attention is computed, see `fnmodels.ops.attention.select`.
    layout: `fnmodels.layout(masks)`; lets kernels skip what a mask rules out.
    layer_fn: called once per kind with the bound block, a callable (layer, x, mask, freqs, **tensors) -> (x, aux);
        returns the one to use (checkpointed, compiled, gathered). It must pass keywords on.
    experts: how the chosen experts are computed, see `fnmodels.ops.moe.experts`.
    context: a subclass of `fnmodels.models.common.context.Context`, which extends what blocks can do (an edit of every
        tap, say) without a change in any family; None for Context itself.
    """

    kernel: Kernel = "auto"
    layout: Layout | None = None
    layer_fn: LayerFn | None = None
    experts: str | Experts = "auto"
    context: Callable[..., Any] | None = None

"""How a function of (params, batch) is called: once per microbatch, with what the step wraps, compiles or knows.

Losses and per-token outputs share it, so that what a function computes in training and outside of it is the same call.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fnmodels import document_layout, tree
from fnmodels.inputs.layout import Layout
from fnmodels.options import LayerFn
from fnmodels.tree import Tree

from .remat import layer_fn

Batch = Mapping[str, Tensor]


def caller(
    function: Callable[..., Any], *, remat: str = "none", compile: str = "none", counts: bool = False
) -> Callable[[Tree, Batch], Any]:
    """call(params, batch) -> function(params, batch, ...), with its keywords `layer_fn`, `layout` and `aux` filled in.

    remat, compile: as in `train.make_step`. counts: ask for `aux`. What a functools.partial has bound already stays.
    """
    if compile not in ("none", "block", "whole"):
        raise ValueError(f'compile is {compile!r}; it must be "none", "block" or "whole".')
    wrap = layer_fn(remat, compile)
    takes = open_keywords(function)
    if wrap is not None and "layer_fn" not in takes:
        raise ValueError(
            f"remat={remat!r} and compile={compile!r} wrap the model's layers, so the function needs a free keyword "
            "`layer_fn`, which it hands to fnmodels.forward or fnmodels.hidden."
        )
    if counts and "aux" not in takes:
        raise ValueError(
            "balance_rate needs to know how many tokens each expert gets, so the loss function needs a free keyword "
            "`aux`, False by default, with which it returns (sum, count, aux) as train.next_token_loss does."
        )
    run = torch.compile(function, fullgraph=True) if compile == "whole" else function

    def call(params: Tree, batch: Batch) -> Any:
        chosen: dict[str, Any] = {} if wrap is None else {"layer_fn": wrap}
        chosen |= {"aux": True} if counts else {}
        if "layout" in takes:
            chosen["layout"] = layout_of(batch, compile != "none")
        return run(params, batch, **chosen)

    return call


def compiling(function: Callable[..., Any], compile: str) -> Callable[..., Any]:
    """The function with its layers' blocks compiled, inside of the `layer_fn` that it is given; "none": itself."""
    if compile == "none":
        return function
    compiled, takes = layer_fn("none", "block"), open_keywords(function)
    assert compiled is not None

    @functools.wraps(function)
    def run(params: Tree, batch: Batch, *, layer_fn: LayerFn | None = None, layout: Any = None, **more: Any) -> Any:
        wrap = compiled if layer_fn is None else lambda block: layer_fn(compiled(block))
        fixed = {"layout": layout if layout and _one_per_shape(layout) else None} if "layout" in takes else {}
        return function(params, batch, layer_fn=wrap, **fixed, **more)

    return run


def microbatches(batch: Batch | Sequence[Batch], accumulate: int = 1) -> list[Batch]:
    """A list as it was cut by the caller; else the batch's rows in `accumulate` parts, the first ones one row longer
    where it does not divide. Each is a dict."""
    if isinstance(batch, (list, tuple)):
        if not batch:
            raise ValueError("The list of microbatches is empty; it needs at least one.")
        if accumulate != 1:
            raise ValueError(f"The batch is a list of {len(batch)} microbatches, so accumulate is 1, not {accumulate}.")
        return [_as_dict(part, f"Microbatch {i} of the list") for i, part in enumerate(batch)]
    whole = _as_dict(batch, "A batch that is no list")
    if accumulate == 1:
        return [whole]
    sizes: dict[str, int] = {}
    for name, tensor in tree.flatten(whole).items():
        if not isinstance(tensor, Tensor) or not tensor.ndim or tensor.shape[0] < accumulate:
            what = f"whose shape is {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else "which is no tensor"
            raise ValueError(
                f"accumulate={accumulate} cannot split {name!r}, {what}, by rows: give fewer parts, or a list of "
                "microbatches."
            )
        sizes[name] = tensor.shape[0]
    if len(set(sizes.values())) > 1:
        raise ValueError(f"accumulate={accumulate} splits a batch by rows, and its entries differ in them: {sizes}.")
    return [tree.map(lambda t, i=i: t.tensor_split(accumulate)[i], whole) for i in range(accumulate)]


def _as_dict(batch: Any, what: str) -> dict[str, Tensor]:
    """A dict of any mapping: trees know dicts alone."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"{what} must be a dict of tensors; it is a {type(batch).__name__}.")
    return batch if isinstance(batch, dict) else dict(batch)


def layout_of(batch: Batch, compiled: bool) -> Layout | None:
    """Where documents lie, of what says so. compiled: if all batches of this shape for which it is said are alike."""
    if "positions" not in batch or "segment_ids" not in batch:
        return None
    layout = document_layout(batch["positions"], batch["segment_ids"])
    return layout if not compiled or (layout and _one_per_shape(layout)) else None


def _one_per_shape(layout: Layout) -> bool:
    """Whether all batches of this shape for which this is True have equal layouts."""
    return layout.plain and all(first == (0,) for first in layout.firsts)


def open_keywords(function: Callable[..., Any]) -> set[str]:
    """Which of `layer_fn`, `layout` and `aux` may be passed: keywords that are there and that no partial has bound.

    `aux` changes what is returned, so it is never passed to keywords that a function does not name.
    """
    parameters = inspect.signature(function).parameters.values()
    aux = {p.name for p in parameters if p.name == "aux" and isinstance(p.default, bool)}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return aux | ({"layer_fn", "layout"} - {p.name for p in parameters if p.default not in (None, p.empty)})
    return aux | {p.name for p in parameters if p.name in ("layer_fn", "layout") and p.default in (None, p.empty)}

"""Calls a function of (params, batch) for a step: with remat and compilation around layers, and by microbatches.

Losses and per-token outputs share it, so a function computes the same in training and in evaluation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fnmodels import document_layout, tree
from fnmodels.inputs.layout import Layout
from fnmodels.ops.torch_internals import full_graph
from fnmodels.tree import Tree
from train.losses.model_loss import Batch as Batch
from train.losses.model_loss import ModelLoss, as_loss, is_one_per_shape

from .remat import layer_fn
from .remat_budget import budget_of


class LossFn(Protocol):
    """A loss: (params, batch) -> (sum, count) or (sum, count, aux), sum and count 0-d tensors, aux a tree of sums.

    It runs the model by fnmodels.hidden or forward with the params that it receives: a functools.partial of a loss of
    `train.losses`, a lambda, a closure or a custom function.
    """

    def __call__(self, params: Tree, batch: Batch, /) -> tuple[Any, ...]: ...


def caller(
    function: Callable[..., Any], *, remat: str = "none", compile: str = "none", counts: bool = False
) -> Callable[[Tree, Batch], Any]:
    """call(params, batch) -> function(params, batch), with remat and compilation around the model's layers.

    remat, compile: as in `train.make_step`; ValueError for another compile. counts: the aux must hold the experts'
    counts.
    """
    loss = with_wrappers(as_loss(function), remat, compile)
    if counts:
        loss = loss.with_options(counts=True)
    if compile != "whole":
        return loss.with_options(expected=True)
    compiled = full_graph(_with_layout)
    return lambda params, batch: compiled(loss, params, batch, layout_of(batch))


def with_wrappers(loss: ModelLoss, remat: str, compile: str) -> ModelLoss:
    """The loss with remat and compile="block" around its layers; for "whole" the caller compiles.

    ValueError for another compile.
    """
    if compile not in ("none", "block", "whole"):
        raise ValueError(f'compile is {compile!r}; it must be "none", "block" or "whole".')
    compiled, recomputed = layer_fn("none", compile), layer_fn(remat, "none")
    if compile == "block" and (remat == "selective" or budget_of(remat)):
        # One graph: selective remat saves the results of its operators, and a budget measures it.
        compiled, recomputed = layer_fn(remat, compile), None
    if compiled is None and recomputed is None:
        return loss
    required = None if compile == "whole" else f"remat={remat!r} and compile={compile!r} wrap the model's layers"
    return loss.with_options(inner=compiled, outer=recomputed, compiled=compile == "block", required=required)


def _with_layout(loss: ModelLoss, params: Tree, batch: Batch, layout: Layout | None) -> Any:
    return loss.with_options(layout=layout)(params, batch)


def microbatches(batch: Batch | Sequence[Batch], accumulate: int = 1) -> list[Batch]:
    """The microbatches of a step, each a dict: those of a list, or the batch's rows split into `accumulate`.

    Where the rows do not divide evenly, the first microbatches have one more. ValueError for an empty list, accumulate
    with a list, entries that are not mappings, and tensors that differ in their rows or have fewer than `accumulate`.
    """
    if isinstance(batch, (list, tuple)):
        if not batch:
            raise ValueError("The list of microbatches is empty; it needs at least one.")
        if accumulate != 1:
            raise ValueError(f"The batch is a list of {len(batch)} microbatches, so accumulate is 1, not {accumulate}.")
        return [_as_dict(one, f"Microbatch {i} of the list") for i, one in enumerate(batch)]
    full = _as_dict(batch, "A batch that is no list")
    if accumulate == 1:
        return [full]
    sizes: dict[str, int] = {}
    for name, tensor in tree.flatten(full).items():
        if not tensor.ndim or tensor.shape[0] < accumulate:
            raise ValueError(
                f"accumulate={accumulate} cannot split {name!r}, whose shape is {tuple(tensor.shape)}, by rows: give "
                "fewer parts, or a list of microbatches."
            )
        sizes[name] = tensor.shape[0]
    if len(set(sizes.values())) > 1:
        raise ValueError(f"accumulate={accumulate} splits a batch by rows, and its entries differ in them: {sizes}.")
    return [tree.map(lambda t, i=i: t.tensor_split(accumulate)[i], full) for i in range(accumulate)]


def _as_dict(batch: Any, what: str) -> dict[str, Tensor]:
    """The mapping as a dict, the only mapping that trees support. what: names it in the ValueError."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"{what} must be a dict of tensors; it is a {type(batch).__name__}.")
    made = batch if isinstance(batch, dict) else dict(batch)
    for path, entry in tree.flatten(made).items():
        check_entry(path, entry)
    return made


def check_entry(path: str, entry: Any) -> None:
    """ValueError for an entry of a batch that is no dense tensor: nested and sparse ones have no rows to take."""
    if not isinstance(entry, Tensor):
        raise ValueError(
            f"The batch's {path!r} is of type {type(entry).__name__}; entries are tensors: give a number by "
            "functools.partial to the loss, or as a tensor."
        )
    if entry.is_nested:
        raise ValueError(
            f"The batch's {path!r} is a nested (jagged) tensor; entries are dense: train.token_budget packs sequences "
            "of any lengths, jagged tensors among them, into dense rows."
        )
    if entry.layout is not torch.strided:
        raise ValueError(f"The batch's {path!r} has the layout {entry.layout}; entries are dense: give its to_dense().")


def layout_of(batch: Batch) -> Layout | None:
    """The batch's layout for compiled code; None unless all batches of its shape share it."""
    if "positions" not in batch or "segment_ids" not in batch:
        return None
    layout = document_layout(batch["positions"], batch["segment_ids"])
    return layout if layout and is_one_per_shape(layout) else None

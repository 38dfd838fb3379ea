"""`ModelLoss`: a loss function of (params, batch) with the `RunOptions` by which a run calls the model inside it.

    loss = ModelLoss(functools.partial(next_token_loss, config=config))
    loss = loss.with_options(blocks={"outer": layer_fn("full", "none")})    # a mesh and a pipeline set more
    total, count = loss(params, batch)

The options travel with the params (`fnmodels.run_params`), so a partial, a lambda, a closure and a custom loss run
alike, as long as they call fnmodels.hidden or forward with the params that they receive. Losses and per-token outputs
share it, so a function computes the same in training and in evaluation.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fnmodels import tree
from fnmodels.inputs import document_layout
from fnmodels.inputs.layout import Layout
from fnmodels.ops.torch_compilation import full_graph
from fnmodels.run_params import RunParams
from fnmodels.tree import Tree

from .batch import Entries
from .remat import layer_fn
from .remat_budget import budget_of
from .run_options import PLAIN, Blocks, Ranks, Reports, RunOptions, Stage, is_one_per_shape


class LossFn(Protocol):
    """A loss: (params, batch) -> (sum, count) or (sum, count, aux), sum and count 0-d tensors, aux a tree of sums.

    It runs the model by fnmodels.hidden or forward with the params that it receives: a functools.partial of a loss of
    `train.losses`, a lambda, a closure or a custom function.
    """

    def __call__(self, params: Tree, batch: Entries, /) -> tuple[Any, ...]: ...


@dataclass(frozen=True)
class ModelLoss:
    """A function of (params, batch), called with the options of a run.

    Args:
        function: The loss, or another function of (params, batch) that runs the model.
        options: How the run calls the model (mesh, remat, compilation); by default it changes nothing.
        params: Maps a rank's params (shards) to those that the function receives; None: unchanged.
    """

    function: Callable[..., Any]
    options: RunOptions = PLAIN
    params: Callable[[Tree], Tree] | None = None

    def __call__(self, params: Tree, batch: Entries) -> Any:
        """The function's result, with the errors of `check_reached`."""
        given = self.entered(params)
        result = self.function(given, batch)
        self.check_reached(given, params, batch)
        return result

    def entered(self, params: Tree) -> RunParams:
        """The params that the function receives. After its call, pass them to `check_reached`.

        Args:
            params: The rank's tree of parameters.

        Returns:
            The params with the run's options, which `fnmodels.hidden` and its like read.
        """
        options, reports = self.options, self.options.reports
        if reports.expected or reports.required is not None:
            noting = Reports(reports.counts, reports.required, reports.expected, [])
            options = RunOptions(options.blocks, options.ranks, options.stage, noting)
        return RunParams(params if self.params is None else self.params(params), options)

    def check_reached(self, given: RunParams, params: Tree, batch: Entries) -> None:
        """Checks after a call that the run's options reached the model's layers.

        It warns where packed rows were run without their layout, because the function copied the params to a dict.

        Args:
            given: The params that the function received, of `entered`.
            params: The rank's tree of parameters.
            batch: The batch of the call.

        Raises:
            ValueError: Options that are required, such as remat, did not reach the layers.
        """
        reports = self.options.reports
        reached = bool(given.run.reports.reached) if isinstance(given.run, RunOptions) else False
        if reports.required is not None and not reached:
            raise ValueError(
                f"{reports.required}, so the loss must run the model by fnmodels.hidden, forward or run_layers with "
                "the params that it is given (or a fnmodels.tree.map of these); layers of its own are wrapped by "
                "train.loss.run_options(params).layer_fn."
            )
        if reached and isinstance(params, RunParams) and isinstance(params.run, RunOptions):
            params.run.note_reached()  # of a loss around this one
        if reports.expected and not reached and isinstance(batch, Mapping) and "segment_ids" in batch:
            warnings.warn(
                "The loss did not run the model with the params that it received (or a fnmodels.tree.map of these): a "
                "copy such as {**params} leaves out the layout of packed rows, and attention then takes longer.",
                stacklevel=3,
            )

    def with_options(self, *, stage: Stage | None = None, **groups: Mapping[str, Any]) -> ModelLoss:
        """The same loss with fields of its options replaced: with_options(reports={"counts": True}).

        Args:
            stage: The stage of a pipeline that replaces the current one; None: unchanged.
            **groups: For each group of `RunOptions` (blocks, ranks, reports) the fields to replace.

        Returns:
            The new loss; this one is unchanged.
        """
        changed = {name: dataclasses.replace(getattr(self.options, name), **group) for name, group in groups.items()}
        options = dataclasses.replace(self.options, stage=stage or self.options.stage, **changed)
        return dataclasses.replace(self, options=options)


def as_loss(function: Callable[..., Any]) -> ModelLoss:
    """The function as a `ModelLoss`."""
    return function if isinstance(function, ModelLoss) else ModelLoss(function)


def computed_in(dtype: torch.dtype, function: Callable[..., Any]) -> ModelLoss:
    """The loss with its trainable parameters, those that require a gradient, in `dtype`, as fsdp gathers them."""
    loss = as_loss(function)

    def cast(params: Tree) -> Tree:
        given = params if loss.params is None else loss.params(params)
        return tree.map(lambda leaf: leaf.to(dtype) if leaf.requires_grad else leaf, given)

    return dataclasses.replace(loss, params=cast)


def run_options(params: Tree) -> RunOptions:
    """The options that travel with a loss's params, for a loss that runs layers without `fnmodels.hidden`.

    Args:
        params: The params that the loss received.

    Returns:
        The `RunOptions`; the defaults, which change nothing, for a plain tree.
    """
    if not isinstance(params, RunParams):
        return PLAIN
    options: Any = params.run
    if not isinstance(options, RunOptions):
        return PLAIN
    options.note_reached()
    return options


def beside(params: Tree, other: Tree) -> Tree:
    """The params of a second model, such as a teacher, for a call inside a loss on the same batch without a gradient.

    Under context parallelism the second model must use the run's attention kernel; otherwise `other` can be used
    directly.

    Args:
        params: The params that the loss received.
        other: The tree of the second model, unsharded.

    Returns:
        `other` with those of the run's options that hold for a second model.
    """
    options = run_options(params)
    ranks = Ranks(kernel=options.ranks.kernel, length=options.ranks.length)
    return RunParams(other, RunOptions(Blocks(compiled=options.blocks.compiled), ranks))


def caller(
    function: Callable[..., Any], *, remat: str = "none", compile: str = "none", counts: bool = False
) -> ModelLoss:
    """The function of (params, batch) with remat and compilation around the model's layers.

    remat, compile: as in `train.make_step`; ValueError for another compile. counts: the aux must hold the experts'
    counts.
    """
    loss = with_wrappers(as_loss(function), remat, compile)
    if counts:
        loss = loss.with_options(reports={"counts": True})
    if compile != "whole":
        return loss.with_options(reports={"expected": True})
    compiled = full_graph(_with_layout)
    return ModelLoss(lambda given, batch: compiled(loss, dict(given), batch, layout_of(batch)))


def with_wrappers(loss: ModelLoss, remat: str, compile: str) -> ModelLoss:
    """The loss with remat and compile="block" around its layers; for "whole" the caller compiles.

    ValueError for another compile.
    """
    if compile not in ("none", "block", "whole"):
        raise ValueError(f'compile is {compile!r}; it must be "none", "block" or "whole", or for make_step "step".')
    compiled, recomputed = layer_fn("none", compile), layer_fn(remat, "none")
    if compile == "block" and (remat == "selective" or budget_of(remat)):
        # One graph: selective remat saves the results of its operators, and a budget measures it.
        compiled, recomputed = layer_fn(remat, compile), None
    if compiled is None and recomputed is None:
        return loss
    required = None if compile == "whole" else f"remat={remat!r} and compile={compile!r} wrap the model's layers"
    wrappers = {"inner": compiled, "outer": recomputed, "compiled": compile == "block"}
    return loss.with_options(blocks=wrappers, reports={"required": required})


def _with_layout(loss: ModelLoss, params: Tree, batch: Entries, layout: Layout | None) -> Any:
    return loss.with_options(blocks={"layout": layout})(params, batch)


def layout_of(batch: Entries) -> Layout | None:
    """The batch's layout for compiled code; None unless all batches of its shape share it."""
    if "positions" not in batch or "segment_ids" not in batch:
        return None
    layout = document_layout(batch["positions"], batch["segment_ids"])
    return layout if layout and is_one_per_shape(layout) else None

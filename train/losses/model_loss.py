"""The one form of a loss: a function of (params, batch), and how the run calls the model inside of it.

    loss = ModelLoss(functools.partial(next_token_loss, config=config))
    loss = loss.with_options(outer=layer_fn("full", "none"))       # one process; a mesh and a pipeline set more
    total, count = loss(params, batch)

The options travel with the params (`fnmodels.run_params`), so that a partial, a lambda, a closure and a user's own
loss, which call fnmodels.hidden or forward with the params that they are given, all run the same way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Mask, MaskLike
from fnmodels.inputs.values import readable
from fnmodels.options import Block, Experts, ForwardOptions, Kernel, LayerFn
from fnmodels.run_params import RunParams
from fnmodels.tree import Tree

from .moe_balance import Balance

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class RouterTerms:
    """What a loss wants of the routers of all layers: `balance` terms, and with `aux` sums of what they did.

    labelled [B]: labels that count in each row.
    """

    balance: Balance
    labelled: Tensor
    aux: bool


@dataclass(frozen=True)
class RunOptions:
    """How a run calls the model inside of a loss. Each field is unset where one process runs the layers as they are.

    inner, outer: go around the model's blocks, inside (compilation) and outside (gathering, remat) of a layer_fn that
        the loss gives. tensor: (block, around=those three) -> the block on tensor-parallel shards.
    layout: for a loss that gives none; None: made here from the masks, where their values can be read on the host.
    compiled: the blocks are compiled, so that only layouts that all batches of one shape share are made.
    counts: losses of models with experts return aux with counts, whether or not they were called with aux=True.
    kernel, experts, balance: from the loss' own choice, what computes it when other processes have other tokens.
    length: (config, positions, the loss' own length) -> that of the global batch, for rope scalings that depend on it.
    stage: replaces the layers: (params, inputs, masks, freqs_cis, config, taps, options) -> (states, taps).
    routers: what the loss that is running wants of the routers; `stage` reads it.
    required: the options that must reach the model's layers, as part of a sentence; None: none must.
    """

    inner: LayerFn | None = None
    outer: LayerFn | None = None
    tensor: Callable[..., Block] | None = None
    layout: Layout | None = None
    compiled: bool = False
    counts: bool = False
    kernel: Callable[[Kernel], Kernel] | None = None
    experts: Callable[[str | Experts], Experts] | None = None
    balance: Callable[[Balance], Balance] | None = None
    length: Callable[[Any, Tensor, Any], Any] | None = None
    stage: Callable[..., tuple[Tensor, dict[str, Tensor]]] | None = None
    routers: RouterTerms | None = None
    required: str | None = None
    reached: list[bool] | None = None  # filled when the model runs

    def adapted(self, options: ForwardOptions, masks: Mapping[str, MaskLike]) -> ForwardOptions:
        """`Run.adapted`."""
        if self.reached is not None:
            self.reached.append(True)
        kernel = options.kernel if self.kernel is None else self.kernel(options.kernel)
        experts = options.experts if self.experts is None else self.experts(options.experts)
        layer_fn = self._around(options.layer_fn)
        layout = self.layout_of(options, masks)
        return dataclasses.replace(options, kernel=kernel, layout=layout, layer_fn=layer_fn, experts=experts)

    @property
    def layer_fn(self) -> LayerFn | None:
        """What goes around the model's blocks."""
        return self._around(None)

    def _around(self, own: LayerFn | None) -> LayerFn | None:
        wraps = [wrap for wrap in (self.inner, own, self.outer) if wrap is not None]

        def around(block: Block) -> Block:
            return functools.reduce(lambda inner, wrap: wrap(inner), wraps, block)

        if self.tensor is not None:
            return functools.partial(self.tensor, around=around)
        return around if wraps else None

    def layout_of(self, options: ForwardOptions, masks: Mapping[str, MaskLike]) -> Layout | None:
        """The layout of a call: the caller's, or the run's, or made from the masks."""
        if options.layout is not None or self.layout is not None:
            return options.layout or self.layout
        if self.kernel is not None:  # of a shard of the positions a layout is of no use
            return None
        made = readable_layout(masks)
        return made if made is None or not self.compiled or is_one_per_shape(made) else None

    def hidden(
        self,
        params: RunParams,
        inputs: Tree,
        masks: Mapping[str, MaskLike],
        freqs_cis: Mapping[str, Tensor],
        config: Any,
        taps: tuple[str, ...],
        options: ForwardOptions,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`Run.hidden`."""
        freqs_cis = self._global_tables(inputs, freqs_cis, config)
        if self.stage is not None:
            return self.stage(params, inputs, masks, freqs_cis, config, taps, options)
        given = keywords(self.adapted(options, masks))
        found = fnmodels.hidden(dict(params), inputs, masks, freqs_cis, config=config, taps=taps, **given)
        return found if taps else (found, {})

    def _global_tables(self, inputs: Tree, freqs_cis: Mapping[str, Tensor], config: Any) -> Mapping[str, Tensor]:
        """The rotary tables; those of the global batch where the loss made them from its own positions alone."""
        positions = inputs.get("positions") if isinstance(inputs, Mapping) else None
        if self.length is None or positions is None:
            return freqs_cis
        length = self.length(config, positions, None)
        if length is None:
            return freqs_cis
        family = fnmodels.family_of(config)
        local = tree.leaves(family.freqs_cis(config, positions, length=None))
        if all(map(torch.equal, local, tree.leaves(freqs_cis))):
            tables: Mapping[str, Tensor] = family.freqs_cis(config, positions, length=length)
            return tables
        return freqs_cis


@dataclass(frozen=True)
class ModelLoss:
    """A function of (params, batch), called with the options of a run.

    params: maps what a process holds (shards) to the params that the function is given; None: these are the same.
    """

    function: Callable[..., Any]
    options: RunOptions = RunOptions()
    params: Callable[[Tree], Tree] | None = None

    def __call__(self, params: Tree, batch: Batch) -> Any:
        """What the function returns. ValueError where options must reach the layers and did not."""
        reached: list[bool] = []
        options = self.options
        if options.required is not None:
            options = dataclasses.replace(options, reached=reached)
        found = self.function(RunParams(params if self.params is None else self.params(params), options), batch)
        if options.required is not None and not reached:
            raise ValueError(
                f"{options.required}, so the loss must run the model by fnmodels.hidden, forward or run_layers with "
                "the params that it is given (or a fnmodels.tree.map of these); layers of its own are wrapped by "
                "train.run_options(params).layer_fn."
            )
        return found

    def with_options(self, **changes: Any) -> ModelLoss:
        """The same loss with these `RunOptions` replaced."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **changes))


def as_loss(function: Callable[..., Any]) -> ModelLoss:
    """A `ModelLoss` of any function of (params, batch)."""
    return function if isinstance(function, ModelLoss) else ModelLoss(function)


def run_options(params: Tree) -> RunOptions:
    """The options of the run whose params a loss is given, for one that does not run the model by fnmodels alone."""
    if not isinstance(params, RunParams):
        return RunOptions()
    options: Any = params.run
    if options.reached is not None:
        options.reached.append(True)
    return options if isinstance(options, RunOptions) else RunOptions()


def beside(params: Tree, other: Tree) -> Tree:
    """`other`, the params of a second model (a teacher), for calls on the same batch: no gradient, nothing sharded.

    Attention over the shards of a sequence must know of it: elsewhere the second model is called with `other` itself.
    """
    options = run_options(params)
    unshared = RunOptions(compiled=options.compiled, kernel=options.kernel, length=options.length)
    return RunParams(other, unshared)


def keywords(options: ForwardOptions) -> dict[str, Any]:
    """The options as keywords of fnmodels.hidden and run_layers."""
    return {name: value for name, value in vars(options).items() if value is not None}


def readable_layout(masks: Mapping[str, MaskLike]) -> Layout | None:
    """`fnmodels.layout`, where the host can read what the masks hold: not in a graph, under vmap or on meta."""
    found = [mask for mask in masks.values() if isinstance(mask, Mask)]
    if torch.compiler.is_compiling() or not all(map(readable, tree.leaves(found))):
        return None
    return fnmodels.layout(masks)


def is_one_per_shape(layout: Layout) -> bool:
    """Whether all batches of this shape for which this is True have equal layouts."""
    return layout.plain and all(first == (0,) for first in layout.firsts)

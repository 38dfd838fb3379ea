"""`ModelLoss`: a loss function of (params, batch) with the `RunOptions` by which a run calls the model inside it.

    loss = ModelLoss(functools.partial(next_token_loss, config=config))
    loss = loss.with_options(outer=layer_fn("full", "none"))       # one process; a mesh and a pipeline set more
    total, count = loss(params, batch)

The options travel with the params (`fnmodels.run_params`), so a partial, a lambda, a closure and a custom loss run
alike, as long as they call fnmodels.hidden or forward with the params that they receive.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Mask, MaskLike, attention_part
from fnmodels.inputs.values import readable
from fnmodels.models.common.registry import DecoderConfig, is_indexed
from fnmodels.options import Block, Experts, ForwardOptions, Kernel, LayerFn
from fnmodels.run_params import RunParams
from fnmodels.tree import Tree

from .moe_balance import Balance

Batch = Mapping[str, Tensor]
PLACES = "places"  # batch key: each token's position in the unpermuted row, [B, S]
FULL_ROWS = "rows"  # batch key: a dict of the full rows, beside this rank's positions of them


def check_entries(batch: Batch, *names: str) -> None:
    """ValueError unless the batch has all of these keys."""
    missing = [name for name in names if name not in batch]
    if missing:
        raise ValueError(f"The batch has no {' and no '.join(missing)}; its keys are {sorted(batch)}.")


@dataclass(frozen=True)
class RouterTerms:
    """Terms of a loss from the routers of all layers: `balance` terms, and with `aux` sums of their statistics.

    labelled [B]: the number of labels that count in each row.
    """

    balance: Balance
    labelled: Tensor
    aux: bool


@dataclass(frozen=True)
class RunOptions:
    """How a run calls the model inside a loss. The defaults run the layers unchanged in one process.

    inner, outer: wrap the model's blocks, inside (compilation) or outside (all-gather, remat) of the loss's layer_fn.
    tensor: (block, around=those three) -> the block on tensor-parallel shards.
    layout: for a loss that passes none; None: computed here from the masks, where the host can read their values.
    compiled: the blocks are compiled, so only layouts shared by all batches of one shape are used, except where
        documents are tensors, see `layout_of`.
    counts: losses of models with experts return aux with counts even without aux=True.
    kernel, experts, balance: map the loss's own choice to one that works when other ranks hold other tokens.
    length: (config, positions, the loss's own length) -> the global batch's length, for rope scalings that use it.
    full_rows: (x [B, S, ...], PLACES) -> (x of the full rows in order, 1 on the first rank of cp and 0 on others).
    sequence: whether ranks of tp have some positions each of the residual stream.
    all_documents: x [N, ...] of this rank's documents -> [M, ...] of those of all ranks with other rows, with
        gradients; entries beyond a rank's documents are -100. None: this rank has them all.
    stage: replaces the layers: (params, inputs, masks, freqs_cis, config, taps, options) -> (states, taps).
    routers: the `RouterTerms` of the loss that is running, for `stage`.
    required: the options that must reach the model's layers, as part of a sentence; None: no check.
    expected: the function runs the model here, and is warned if it does so with a copy of the params.
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
    full_rows: Callable[[Tensor, Tensor], tuple[Tensor, int]] | None = None
    sequence: bool = False
    all_documents: Callable[[Tensor], Tensor] | None = None
    routers: RouterTerms | None = None
    required: str | None = None
    expected: bool = False
    reached: list[bool] | None = None  # filled when the model runs

    @property
    def staged(self) -> bool:
        """`Run.staged`."""
        return self.stage is not None

    def adapted(self, options: ForwardOptions, masks: Mapping[str, MaskLike]) -> ForwardOptions:
        """`Run.adapted`."""
        self.note_reached()
        kernel = options.kernel if self.kernel is None else self.kernel(options.kernel)
        experts = options.experts if self.experts is None else self.experts(options.experts)
        layer_fn = self._around(options.layer_fn)
        layout = self.layout_of(options, masks)
        return dataclasses.replace(options, kernel=kernel, layout=layout, layer_fn=layer_fn, experts=experts)

    def note_reached(self) -> None:
        """Records that the model runs with these options."""
        if self.reached is not None:
            self.reached.append(True)

    @property
    def layer_fn(self) -> LayerFn | None:
        """The wrapper of the model's blocks; None: none."""
        return self._around(None)

    def _around(self, own: LayerFn | None) -> LayerFn | None:
        wraps = [wrap for wrap in (self.inner, own, self.outer) if wrap is not None]

        def around(block: Block) -> Block:
            return functools.reduce(lambda inner, wrap: wrap(inner), wraps, block)

        if self.tensor is not None:
            return functools.partial(self.tensor, around=around)
        return around if wraps else None

    def layout_of(self, options: ForwardOptions, masks: Mapping[str, MaskLike]) -> Layout | None:
        """The layout of a call: the caller's, the run's, or one computed from the masks."""
        if options.layout is not None or self.layout is not None:
            return options.layout or self.layout
        if self.kernel is not None:  # a layout does not apply to a shard of the positions
            return None
        made = readable_layout(masks)
        if made is None or not self.compiled or is_one_per_shape(made):
            return made
        # On CUDA documents are an argument of compiled blocks; some kernels and kinds are bound to a layout.
        bound = callable(options.kernel) or options.kernel == "blocks" or any(map(is_indexed, masks))
        return None if bound or not all(leaf.is_cuda for leaf in _tensors(masks)) else made

    def hidden(
        self,
        params: RunParams,
        inputs: Tree,
        masks: Mapping[str, MaskLike],
        freqs_cis: Mapping[str, Tensor],
        config: DecoderConfig,
        taps: tuple[str, ...],
        options: ForwardOptions,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """`Run.hidden`."""
        self.note_reached()
        freqs_cis = self._global_tables(inputs, freqs_cis, config)
        if self.stage is not None:
            return self.stage(params, inputs, masks, freqs_cis, config, taps, options)
        given = keywords(self.adapted(options, masks))
        found = fnmodels.hidden(dict(params), inputs, masks, freqs_cis, config=config, taps=taps, **given)
        return found if taps else (found, {})

    def _global_tables(
        self, inputs: Tree, freqs_cis: Mapping[str, Tensor], config: DecoderConfig
    ) -> Mapping[str, Tensor]:
        """The rotary tables, replaced by the global batch's where the loss computed them from its local positions."""
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

    params: maps a rank's params (shards) to those that the function receives; None: unchanged.
    """

    function: Callable[..., Any]
    options: RunOptions = RunOptions()
    params: Callable[[Tree], Tree] | None = None

    def __call__(self, params: Tree, batch: Batch) -> Any:
        """The function's result. ValueError where required options did not reach the model's layers.

        A warning where packed rows were run without their layout, because the function copied the params to a dict.
        """
        reached: list[bool] = []
        options = self.options
        if options.expected or options.required is not None:
            options = dataclasses.replace(options, reached=reached)
        found = self.function(RunParams(params if self.params is None else self.params(params), options), batch)
        if options.required is not None and not reached:
            raise ValueError(
                f"{options.required}, so the loss must run the model by fnmodels.hidden, forward or run_layers with "
                "the params that it is given (or a fnmodels.tree.map of these); layers of its own are wrapped by "
                "train.run_options(params).layer_fn."
            )
        if reached and isinstance(params, RunParams) and isinstance(params.run, RunOptions):
            params.run.note_reached()  # of a loss around this one
        if options.expected and not reached and isinstance(batch, Mapping) and "segment_ids" in batch:
            warnings.warn(
                "The loss did not run the model with the params that it received (or a fnmodels.tree.map of these): a "
                "copy such as {**params} leaves out the layout of packed rows, and attention then takes longer.",
                stacklevel=2,
            )
        return found

    def with_options(self, **changes: Any) -> ModelLoss:
        """The same loss with these `RunOptions` replaced."""
        return dataclasses.replace(self, options=dataclasses.replace(self.options, **changes))


def as_loss(function: Callable[..., Any]) -> ModelLoss:
    """The function as a `ModelLoss`."""
    return function if isinstance(function, ModelLoss) else ModelLoss(function)


def run_options(params: Tree) -> RunOptions:
    """The `RunOptions` that travel with a loss's params, for a loss that runs layers without fnmodels.hidden."""
    if not isinstance(params, RunParams):
        return RunOptions()
    options: Any = params.run
    if not isinstance(options, RunOptions):
        return RunOptions()
    options.note_reached()
    return options


def beside(params: Tree, other: Tree) -> Tree:
    """`other`, the params of a second model (teacher), for a call on the same batch without a gradient; unsharded.

    Under context parallelism the second model must use the run's attention kernel; otherwise `other` can be used
    directly.
    """
    options = run_options(params)
    unshared = RunOptions(compiled=options.compiled, kernel=options.kernel, length=options.length)
    return RunParams(other, unshared)


def keywords(options: ForwardOptions) -> dict[str, Any]:
    """The options that are set, as keyword arguments of fnmodels.hidden and run_layers."""
    return {name: value for name, value in vars(options).items() if value is not None}


def readable_layout(masks: Mapping[str, MaskLike]) -> Layout | None:
    """`fnmodels.layout`, or None where the host cannot read the masks: in a graph, under vmap, on meta."""
    if torch.compiler.is_compiling() or not all(map(readable, _tensors(masks))):
        return None
    return fnmodels.layout(masks)


def _tensors(masks: Mapping[str, MaskLike]) -> list[Tensor]:
    """Those of `fnmodels.Mask`s."""
    return tree.leaves([mask for mask in map(attention_part, masks.values()) if isinstance(mask, Mask)])


def is_one_per_shape(layout: Layout) -> bool:
    """Whether the layout is the same for all batches of its shape for which this is True."""
    return layout.plain and all(first == (0,) for first in layout.firsts)

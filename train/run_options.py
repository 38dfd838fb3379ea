"""`RunOptions`: how a run (its mesh, remat, compilation, pipeline) calls the model inside a loss, in four groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fnmodels
from fnmodels import tree
from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import Mask, MaskLike, attention_part
from fnmodels.inputs.values import has_values, unwrapped
from fnmodels.models.common.family import DecoderConfig, LayerKind, parsed
from fnmodels.ops.attention.checks import layout_at_hand
from fnmodels.ops.torch_internals import undisturbed
from fnmodels.options import USUAL, Block, Experts, ForwardOptions, Kernel, LayerFn
from fnmodels.tree import Tree

SCORES = ("softmax", "sigmoid")
Adding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Balance:
    """Coefficients of the balance terms added to a loss; each term is a mean over layers and tokens.

    A caller sets the first four fields; a run over a mesh sets the rest.

    Args:
        sequence: The coefficient of `balance_loss` per row.
        batch: The coefficient of `balance_loss` over all rows of one call, which therefore depends on the split into
            microbatches.
        z: The coefficient of `router_z_loss`.
        scores: "softmax" or "sigmoid": how the router's logits become scores, see `balance_loss`.
        over: Sums integer tensors over the ranks that hold other tokens of the same rows. Each rank's terms are then
            its contribution to the global ones.
        across: Sums integer tensors over all ranks that hold other tokens of the batch.
        share: The fraction of the model's layers with experts that this pipeline stage runs; None: all.
        before: The terms of the stages before, 0-d; None: there are none.

    Raises:
        ValueError: A coefficient is negative, or `scores` is another word.
    """

    sequence: float = 0.0
    batch: float = 0.0
    z: float = 0.0
    scores: str = "softmax"
    over: Adding | None = None
    across: Adding | None = None
    share: float | None = None
    before: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("sequence", "batch", "z"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; a coefficient must be at least 0.")
        if self.scores not in SCORES:
            raise ValueError(f"scores is {self.scores!r}; it must be one of {', '.join(SCORES)}.")


@dataclass(frozen=True)
class RouterTerms:
    """Terms of a loss from the routers of all layers: `balance` terms, and with `aux` sums of their statistics.

    labelled [B]: the number of labels that count in each row.
    """

    balance: Balance
    labelled: Tensor
    aux: bool


@dataclass(frozen=True)
class Blocks:
    """Wrappers of the model's blocks, and the layout that they run with.

    inner, outer: wrap blocks inside (compilation) and outside (all-gather, remat) of the loss's layer_fn.
    tensor: (block, around=those three) -> the block on tensor-parallel shards.
    compiled: the blocks are compiled, so only layouts shared by all batches of one shape are used, except where
        documents are tensors, see `RunOptions.layout_of`.
    layout: for a loss that passes none; None: computed from the masks, where the host can read their values.
    """

    inner: LayerFn | None = None
    outer: LayerFn | None = None
    tensor: Callable[..., Block] | None = None
    compiled: bool = False
    layout: Layout | None = None

    def around(self, layer_fn: LayerFn | None) -> LayerFn | None:
        """The wrapper of a block, around which the loss's own layer_fn is; None: there is nothing to wrap."""
        wraps = [wrap for wrap in (self.inner, layer_fn, self.outer) if wrap is not None]

        def around(block: Block) -> Block:
            return functools.reduce(lambda inner, wrap: wrap(inner), wraps, block)

        if self.tensor is not None:
            return functools.partial(self.tensor, around=around)
        if len(wraps) == 1:
            return wraps[0]
        return around if wraps else None


@dataclass(frozen=True)
class Ranks:
    """Replacements of parts of a computation where other ranks hold other tokens of the batch.

    kernel, experts, balance: map the loss's own choice to one that works there.
    length: (config, positions, the loss's own length) -> the global batch's length, for rope scalings that use it.
    full_rows: (x [B, S, ...], PLACES) -> (x of the full rows in order, 1 on the first rank of cp and 0 on others).
    all_documents: x [N, ...] of this rank's documents -> [M, ...] of those of all ranks with other rows, with
        gradients; entries beyond a rank's documents are -100. None: this rank has them all.
    sequence: whether ranks of tp have some positions each of the residual stream.
    """

    kernel: Callable[[Kernel], Kernel] | None = None
    experts: Callable[[str | Experts], Experts] | None = None
    balance: Callable[[Balance], Balance] | None = None
    length: Callable[[Any, Tensor, Any], Any] | None = None
    full_rows: Callable[[Tensor, Tensor], tuple[Tensor, int]] | None = None
    all_documents: Callable[[Tensor], Tensor] | None = None
    sequence: bool = False


@dataclass(frozen=True)
class Stage:
    """A stage of a pipeline. routers: the `RouterTerms` of the loss that is running.

    layers: replaces the model's: (params, inputs, masks, freqs_cis, config, taps, options) -> (states, taps).
    """

    layers: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    routers: RouterTerms | None = None


@dataclass(frozen=True)
class Reports:
    """Reports that a run requires of the model's calls, and facts that its caller knows.

    counts: losses of models with experts return aux with counts even without aux=True.
    required: the options that must reach the model's layers, as part of a sentence; None: no check.
    expected: the function runs the model here, and is warned if it does so with a copy of the params.
    reached: filled when the model runs.
    """

    counts: bool = False
    required: str | None = None
    expected: bool = False
    reached: list[bool] | None = None


@dataclass(frozen=True)
class RunOptions:
    """Options by which a run calls the model inside a loss. The defaults run the layers unchanged in one process.

    blocks: wrappers of blocks. ranks: what works over ranks. stage: the stage of a pipeline. reports: what is reported.
    """

    blocks: Blocks = Blocks()
    ranks: Ranks = Ranks()
    stage: Stage | None = None
    reports: Reports = Reports()

    def prepare(
        self,
        config: DecoderConfig,
        inputs: Tree,
        masks: Mapping[str, MaskLike],
        freqs_cis: Mapping[str, Tensor],
        options: ForwardOptions,
    ) -> tuple[Mapping[str, Tensor], ForwardOptions]:
        """(the rotary tables, the loss's options changed and completed by the run's): see `fnmodels.run_params.Run`."""
        self.note_reached()
        if options is USUAL and self.blocks is PLAIN.blocks and self.ranks is PLAIN.ranks and _finds_layout(masks):
            return freqs_cis, options
        ranks, passed = self.ranks, options.layout or self.blocks.layout
        return self._global_tables(config, inputs, freqs_cis), ForwardOptions(
            kernel=options.kernel if ranks.kernel is None else ranks.kernel(options.kernel),
            layout=self.layout_of(options, masks),
            layer_fn=self.blocks.around(options.layer_fn),
            experts=options.experts if ranks.experts is None else ranks.experts(options.experts),
            context=options.context,
            edits=options.edits,
            checked=passed is None,
        )

    def note_reached(self) -> None:
        """Records that the model runs with these options."""
        if self.reports.reached is not None:
            self.reports.reached.append(True)

    @property
    def layer_fn(self) -> LayerFn | None:
        """The wrapper of the model's blocks; None: none."""
        return self.blocks.around(None)

    def layout_of(self, options: ForwardOptions, masks: Mapping[str, MaskLike]) -> Layout | None:
        """The layout of a call: the caller's, the run's, or one computed from the masks."""
        if options.layout is not None or self.blocks.layout is not None:
            return options.layout or self.blocks.layout
        if self.ranks.kernel is not None:  # a layout does not apply to a shard of the positions
            return None
        made = readable_layout(masks)
        if made is None or not self.blocks.compiled or is_one_per_shape(made):
            return made
        # On CUDA documents are an argument of compiled blocks; some kernels and kinds are bound to a layout.
        bound = callable(options.kernel) or options.kernel == "blocks" or any(kind.indexed for kind in parsed(masks))
        parts = [part for part in map(attention_part, masks.values()) if isinstance(part, Mask)]
        return made if not bound and all(part.q_positions.is_cuda for part in parts) else None

    def _global_tables(
        self, config: DecoderConfig, inputs: Tree, freqs_cis: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        """The rotary tables, replaced by the global batch's where the loss computed them from its local positions."""
        if self.ranks.length is None:
            return freqs_cis
        positions = inputs.get("positions") if isinstance(inputs, Mapping) else None
        if positions is None:
            return freqs_cis
        length = self.ranks.length(config, positions, None)
        if length is None:
            return freqs_cis
        family = fnmodels.family_of(config)
        local = tree.leaves(family.freqs_cis(config, positions, length=None))
        if all(map(torch.equal, local, tree.leaves(freqs_cis))):
            tables: Mapping[str, Tensor] = family.freqs_cis(config, positions, length=length)
            return tables
        return freqs_cis


PLAIN = RunOptions()  # made here, since dynamo cannot make its nested defaults in a graph


def _finds_layout(masks: Mapping[str, MaskLike]) -> bool:
    """Whether the model itself finds the layout, as for its usual options: of rows of one document under one mask."""
    mask = next(iter(masks.values()), None)
    if type(mask) is not Mask or any(masks[kind] is not mask or LayerKind.parse(kind).indexed for kind in masks):
        return False
    layout = layout_at_hand(mask)
    return layout is not None and layout.plain


def readable_layout(masks: Mapping[str, MaskLike]) -> Layout | None:
    """`fnmodels.layout`, or None where the host cannot read the masks: in a graph, under vmap, on meta."""
    if torch.compiler.is_compiling():
        return None
    bare: dict[str, MaskLike] = {}
    seen: dict[int, Tensor] = {}  # so that a tensor is unwrapped once, and stays one tensor
    for kind, mask in masks.items():
        part = attention_part(mask)
        if not isinstance(part, Mask):
            continue
        tensors, wrapped = (part.q_positions, part.q_segments, part.kv_positions, part.kv_segments), False
        for tensor in tensors:
            if id(tensor) not in seen:
                seen[id(tensor)] = value = tensor if has_values(tensor) else unwrapped(tensor)
                if not has_values(value):
                    return None
            wrapped = wrapped or seen[id(tensor)] is not tensor
        q_positions, q_segments, kv_positions, kv_segments = [seen[id(tensor)] for tensor in tensors]
        bare[kind] = part
        if wrapped or part.q_spans is not None or part.kv_spans is not None:
            bare[kind] = Mask(q_positions, q_segments, kv_positions, kv_segments, None, None, part.rule)
    return undisturbed(fnmodels.layout, bare)


def is_one_per_shape(layout: Layout) -> bool:
    """Whether the layout is the same for all batches of its shape for which this is True."""
    return layout.plain and all(first == (0,) for first in layout.firsts)

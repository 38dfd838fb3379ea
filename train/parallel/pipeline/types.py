"""The types of pipeline stages: a microbatch as every stage needs it, and what a mesh adds to a stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import MaskLike
from fnmodels.options import ForwardOptions
from fnmodels.tree import Tree
from train.losses.model_loss import Batch, RouterTerms


@dataclass(frozen=True)
class Microbatch:
    """One microbatch, with the arguments of the loss' call of fnmodels.hidden; tensors lead with its rows.

    options: as the loss gave them. layout: the one with which layers run. routers: what the loss needs of the routers.
    """

    batch: Batch
    inputs: Tree
    masks: Mapping[str, MaskLike]
    freqs_cis: Mapping[str, Tensor]
    layout: Layout | None
    config: Any
    taps: tuple[str, ...]
    options: ForwardOptions
    routers: RouterTerms | None


@dataclass(frozen=True)
class StageHooks:
    """What the other dimensions of a mesh add to a stage.

    full_states: gathers the sequence dimension of hidden states before they are sent. dtype: of hidden states between
    stages; None: that of the layers' weights. split_backward: the schedule runs the passes for inputs and for weights
    apart, and parameters are gathered or recomputed, so each layer's must be behind one autograd node.
    """

    full_states: Callable[[Tensor], Tensor] | None = None
    dtype: torch.dtype | None = None
    split_backward: bool = False


ALONE = StageHooks()  # no other mesh dimension

"""The types that pipeline stages exchange: a loss cut between layers, and a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fnmodels.inputs.layout import Layout
from fnmodels.inputs.mask import MaskLike
from fnmodels.options import Experts, Kernel
from fnmodels.tree import Tree
from train.loss_call import Batch
from train.losses.moe_balance import Balance


@dataclass(frozen=True)
class Staged:
    """A loss in the form that a pipeline can run: layers, and what comes behind them.

    head(params, x, batch) -> (sum, count): of the last stage's leaves outside of the layers and the final hidden
    states; for `outputs` whatever is wanted. kernel, length, experts, balance: as in `train.next_token_loss`; length:
    also a function of a microbatch's positions. aux: the head returns (sum, count, metrics), a dict of 0-d sums, which
    stand beside those of balance and are named otherwise. compiled: the layers are, so that layouts must be few.
    check: raises ValueError for a batch that the head cannot read: all stages refuse it then, and not the last alone.
    teacher_config: of a second model that the head runs, called with kernel, length and layout too.
    layered: the head runs layers of its own. It is called with masks, freqs_cis, layout, kernel, experts and layer_fn
    too, and with counts, for which it returns (sum, count, [its layers, E]): these stand behind those of the model.
    """

    config: Any
    head: Callable[[Tree, Tensor, Batch], Any]
    kernel: Kernel = "auto"
    length: int | Tensor | Callable[[Tensor], Tensor] | None = None
    experts: str | Experts = "auto"
    balance: Balance | None = None
    aux: bool = False
    compiled: bool = False
    check: Callable[[Batch], None] | None = None
    teacher_config: Any = None
    layered: bool = False

    def length_of(self, positions: Tensor) -> int | Tensor | None:
        return self.length(positions) if callable(self.length) else self.length


@dataclass(frozen=True)
class Microbatch:
    """What every stage needs of one part of a batch; all but the layout lead with its rows."""

    batch: Batch
    inputs: Mapping[str, Tensor]
    masks: Mapping[str, MaskLike]
    freqs_cis: Mapping[str, Tensor]
    layout: Layout | None

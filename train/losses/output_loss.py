"""A loss as a function of per-token outputs of the model, for one process and every mesh alike."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree

from .model_loss import FULL_ROWS, PLACES, ModelLoss, run_options

Outputs = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class OutputLoss:
    """The loss function(outputs, batch) -> (sum, count[, aux]) of outputs(params, batch) -> {name: [B, S]}.

    function sees full rows on every mesh, over `cp` gathered, with gradients. `Engine.forward_backward` returns the
    outputs of the training pass. ValueError where function returns something else. check_batch: a further check of
    batches, see `train.losses.batch_checks`.
    """

    outputs: Callable[[Tree, Mapping[str, Tensor]], Outputs]
    function: Callable[[Outputs, dict[str, Tensor]], tuple[Any, ...]]
    check_batch: Callable[[Mapping[str, Tensor], Any, Mapping[str, Any]], None] | None = None

    def __call__(self, params: Tree, batch: Mapping[str, Tensor]) -> tuple[Any, ...]:
        given: Any = dict(batch)
        rows, places = given.pop(FULL_ROWS, None), given.pop(PLACES, None)
        found = self.outputs(params, given)
        gather = run_options(params).full_rows
        if gather is None or rows is None:
            return (*_three(self.function(found, given)), found)
        full, weight = gather(torch.stack(tuple(found.values()), -1), places)
        joined = dict(zip(found, full[:, : rows["tokens"].shape[1]].unbind(-1), strict=True))
        total, count, aux = _three(self.function(joined, rows))
        # All ranks of cp compute the same sums, and ranks are summed: only the first one's count.
        aux = None if aux is None else tree.map(lambda x: x * weight, aux)
        return total * weight, count * weight, aux, found


def _three(found: Any) -> tuple[Any, Any, Any]:
    if not isinstance(found, (tuple, list)) or len(found) not in (2, 3):
        raise ValueError("The function of the outputs must return (sum, count) or (sum, count, aux).")
    return found[0], found[1], found[2] if len(found) == 3 else None


def needs_full_rows(function: Callable[..., Any]) -> bool:
    """Whether the function reads FULL_ROWS and PLACES of its batch over `cp`."""
    return isinstance(function.function if isinstance(function, ModelLoss) else function, OutputLoss)

"""`Step`: a train step, and k of them in one call."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fnmodels import tree
from train.batch import Batches, Entries
from train.gradients import Metrics
from train.state import State
from train.update import StepFunction


@dataclass(frozen=True)
class Step:
    """The train step that `train.make_step` returns: step(state, batch) -> (state, metrics).

    alike: what `many` runs in from the second step on, if all batches have the sizes of the first.
    """

    one: StepFunction
    alike: Callable[[], AbstractContextManager[Any]] = nullcontext

    def __call__(self, state: State, batch: Batches) -> tuple[State, Metrics]:
        return self.one(state, batch)

    def many(self, state: State, batches: Entries | Sequence[Batches]) -> tuple[State, Metrics]:
        """k steps in one call: the State and the bits of k calls.

        Args:
            state: of the first step.
            batches: a sequence of k batches, or a batch whose entries [k, ...] are stacked over the steps.

        Returns:
            (the State after the last step, metrics whose tensors [k, ...] are those of all steps).

        Raises:
            ValueError: for no batch, for stacked entries that differ in k, and for metrics that have other shapes than
                those of the first step. A batch that raises leaves the State of an in-place step used up, unless it is
                the first.
        """
        first, *rest = _each(batches)
        state, of_first = self.one(state, first)
        metrics = [of_first]
        with self.alike() if isinstance(batches, Mapping) else nullcontext():
            for batch in rest:
                state, of_step = self.one(state, batch)
                _check_alike(of_first, of_step, len(metrics))
                metrics.append(of_step)
        return state, tree.map(lambda *values: torch.stack(values), *metrics)


def _check_alike(first: Metrics, other: Metrics, number: int) -> None:
    """ValueError for metrics of step `number`, from 0, that cannot be stacked with those of the first."""
    wanted, found = ({path: list(t.shape) for path, t in tree.flatten(m).items()} for m in (first, other))
    for path in [*wanted, *found]:
        if wanted.get(path) != found.get(path):
            raise ValueError(
                f"step.many stacks the metrics of its steps, and {path!r} is {found.get(path)} in step {number} but "
                f"{wanted.get(path)} in the first: return aux of one shape for all batches, or call step for each."
            )


def _each(batches: Entries | Sequence[Batches]) -> Sequence[Batches]:
    if isinstance(batches, Mapping):
        batches = tree.unstack(dict(batches))
    if not batches:
        raise ValueError("step.many takes at least one batch; there are none.")
    return batches

"""`Step`: a train step, and k of them in one call."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.ops.torch_compilation import without_guards
from train.batch import Batches, Entries
from train.gradients import Metrics
from train.state import State, hand_back, is_consumed
from train.update import StepFunction


@dataclass(frozen=True)
class PlannedStep:
    """A step of one batch. known: compiled code that has passed its guards before, in the same call of `many`."""

    run: Callable[[State], tuple[State, Metrics]]
    known: bool = False


@dataclass(frozen=True)
class Step:
    """The train step that `train.make_step` returns: step(state, batch) -> (state, metrics).

    plan: (state, batches, whether these are of one shape) -> the steps of `many`; None: each batch is one of `one`.
    """

    one: StepFunction
    plan: Callable[[State, Sequence[Batches], bool], list[PlannedStep]] | None = None

    def __call__(self, state: State, batch: Batches) -> tuple[State, Metrics]:
        return self.one(state, batch)

    def many(self, state: State, batches: Entries | Iterable[Batches]) -> tuple[State, Metrics]:
        """k steps in one call: the State and the bits of k calls.

        Args:
            state: of the first step.
            batches: k batches, such as a list of them, or a batch whose entries [k, ...] are stacked over the steps.

        Returns:
            (the State after the last step, metrics whose tensors [k, ...] are those of all steps).

        Raises:
            TypeError: for other batches than these.
            ValueError: for no batch, for stacked entries that differ in k, and for metrics that have other shapes than
                those of the first step. With compile="step" all batches are checked before the first step. Where a
                later batch raises all the same, an in-place step hands back `state` as it is after the steps before;
                a note of the error says how many these are.
        """
        given, metrics, after = _each(batches), list[Metrics](), state
        try:
            for known, steps in itertools.groupby(self._planned(state, given, batches), lambda step: step.known):
                with without_guards() if known else nullcontext():
                    for step in steps:
                        after, measured = step.run(after)
                        metrics.append(measured)
                        _check_alike(metrics[0], measured, len(metrics) - 1)
        except BaseException as error:
            if is_consumed(state) and not is_consumed(after):
                hand_back(state, after)
                error.add_note(
                    f"step.many took {len(metrics)} of {len(given)} steps; the State passed is that after them."
                )
            raise
        return after, tree.map(lambda *values: torch.stack(values), *metrics)

    def _planned(
        self, state: State, each: Sequence[Batches], batches: Entries | Iterable[Batches]
    ) -> list[PlannedStep]:
        if self.plan is not None:
            return self.plan(state, each, isinstance(batches, Mapping))
        return [PlannedStep(functools.partial(_step_of, self.one, batch)) for batch in each]


def _step_of(one: StepFunction, batch: Batches, state: State) -> tuple[State, Metrics]:
    return one(state, batch)


def _check_alike(first: Metrics, other: Metrics, number: int) -> None:
    """ValueError for metrics of step `number`, from 0, that cannot be stacked with those of the first."""
    # The rates `lr_of` are numbers, whose keys are patterns of paths: dots in them are not those of a path.
    named = ({key: value for key, value in metrics.items() if key != "lr_of"} for metrics in (first, other))
    wanted, found = ({path: list(t.shape) for path, t in tree.flatten(metrics).items()} for metrics in named)
    for path in [*wanted, *found]:
        if wanted.get(path) != found.get(path):
            raise ValueError(
                f"step.many stacks the metrics of its steps, and {path!r} is {found.get(path)} in step {number} but "
                f"{wanted.get(path)} in the first: return aux of one shape for all batches, or call step for each."
            )


def _each(batches: Entries | Iterable[Batches]) -> Sequence[Batches]:
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise TypeError(
            f"step.many takes a sequence of batches, or a batch whose entries are stacked over the steps, not a "
            f"{type(batches).__name__}."
        )
    each = (tree.unstack(dict(batches)) if batches else []) if isinstance(batches, Mapping) else list(batches)
    if not each:
        raise ValueError("step.many takes at least one batch; there are none.")
    return each

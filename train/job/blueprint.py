"""`Blueprint`: what every process of a run makes its programs and its parameters from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import params as P
from fnmodels import family_of
from fnmodels.tree import Tree
from train.loss import LossFn
from train.state import State


@dataclass(frozen=True)
class Blueprint:
    """The model and the losses of a run. Over a mesh rank 0 sends it to the others, so that it is picklable there.

    Attributes:
        config: of the model.
        spec: of all its leaves, which says what is trainable and what decays.
        loss: (params, batch) -> (sum, count) on held-out data.
        train_loss: the loss of a step, with the terms that only training has.
        initial: (plan) -> the parameters of step 0: the local shards of a plan, or for None the full parameters.
        balance_rate: as in `train.make_step`.
        adapters: whether LoRA adapters alone are trained and saved, beside frozen weights.
    """

    config: Any
    spec: Tree
    loss: LossFn
    train_loss: LossFn
    initial: Callable[[Tree | None], Tree]
    balance_rate: float | None = None
    adapters: bool = False

    @property
    def spec_of_weights(self) -> Tree:
        """The spec of the leaves that a plan shards: without adapters, which are added to sharded weights."""
        return family_of(self.config).spec(self.config) if self.adapters else self.spec

    def saved(self, tree_of_params: Tree) -> Tree:
        """The saved part of a params or spec tree: the adapters only, of which a stage may have none, or all of it."""
        return P.lora.adapters(tree_of_params) if self.adapters else tree_of_params

    def state_to_save(self, state: State) -> State:
        """The part of the state that is saved."""
        return State(state.step, self.saved(state.params), state.opt_state)

    def restored(self, state: State, saved: State) -> State:
        """The inverse of `state_to_save`: completes `saved` with the frozen weights of `state`."""
        if not self.adapters:
            return saved
        return State(saved.step, P.lora.attach(state.params, saved.params), saved.opt_state)

"""A train step without side effects, for the transforms of torch.func."""

from __future__ import annotations  # else a compiler that traces `pure_step` evaluates those of `step`

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from train.batch import Entries
from train.gradients import LossFn, Metrics, checked_loss, valid_count
from train.optim.base import Optimizer, check_optimizer, clip_factor, global_norm, trainable_mask, with_paths
from train.state import State
from train.update import StepOptions, check_state, is_finite, rates_of, updated


def pure_step(
    loss_fn: LossFn, optimizer: Optimizer, *, clip: float | Tensor | None = None
) -> Callable[[State, Entries], tuple[State, dict[str, Any]]]:
    """Makes step(state, batch) -> (state, metrics) without side effects, for the transforms of torch.func.

    It computes what `make_step(..., inplace=False)` does, in operations that go through vmap (over seeds, rates or
    batches), grad (through one step or many: MAML, hypergradients), jvp and torch.compile:

        def tuned(rate, state):
            return train.pure_step(loss_fn, train.adamw(rate))(state, batch)[1]["loss"]
        losses = torch.func.vmap(tuned, (0, None))(rates, state)

    Args:
        loss_fn: (params, batch) -> (sum, count) or (sum, count, aux), as for `make_step`. Second derivatives and jvp
            need a loss whose operations have them; attention of this package takes kernel="math" there by itself.
        optimizer: A `train.Optimizer`, of which `update` is used. Its rate may be a tensor, of a transform too.
        clip: The largest global norm of the gradient, a number or a 0-d tensor; None: no clipping.

    Returns:
        The function. The State is neither consumed nor checked against the optimizer, and the batch is one dict.
        Metrics are those of `make_step`. A parameter that the loss does not depend on has a gradient of 0 here.

    Raises:
        TypeError: The optimizer is no `train.Optimizer`.
    """
    check_optimizer(optimizer)
    StepOptions(clip=clip)

    def step(state: State, batch: Entries) -> tuple[State, Metrics]:
        if not isinstance(batch, Mapping):
            raise TypeError(f"A pure step takes one batch, a dict, not a {type(batch).__name__}: join microbatches.")
        if not isinstance(state, State):
            raise TypeError(f"A pure step takes a State, as train.init_state makes it, not a {type(state).__name__}.")
        flat = tree.flatten(state.params)
        trains = tree.flatten(trainable_mask(state.params, optimizer.traits.trainable))

        def mean(trained: dict[str, Tensor]) -> tuple[Tensor, Any]:
            params = with_paths(lambda path, leaf: trained.get(path, leaf), state.params)
            total, count, *aux = checked_loss(loss_fn(params, batch))
            return total / valid_count(total, count), (count, *aux)

        differentiated = torch.func.grad_and_value(mean, has_aux=True)
        grads, (loss, (count, *aux)) = differentiated({path: leaf for path, leaf in flat.items() if trains[path]})
        norm = global_norm(list(grads.values()))
        finite = is_finite(loss, norm)
        if clip is not None:
            factor = clip_factor(norm, clip)
            grads = {path: grad * factor.to(grad.dtype) for path, grad in grads.items()}
        metrics = {"loss": loss, "count": count, "grad_norm": norm, "finite": finite}
        metrics |= rates_of(optimizer, state.opt_state) | ({"aux": aux[0]} if aux else {})
        return _updated(optimizer, state, [grads.get(path) for path in flat], ~finite), metrics

    return step


def _updated(optimizer: Optimizer, state: State, grads: Sequence[Tensor | None], skip: Tensor) -> State:
    """`updated`, with the sentence of `check_state` where the State is of another optimizer."""
    if torch.compiler.is_compiling():
        return updated(optimizer, state, grads, skip)
    try:
        return updated(optimizer, state, grads, skip)
    except (KeyError, IndexError, TypeError):
        check_state(optimizer, state)
        raise

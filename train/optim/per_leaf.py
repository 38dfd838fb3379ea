"""`leafwise`: an Optimizer from an update rule for one leaf, for optimizers that treat leaves independently."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree

from . import base
from .base import OnFull, Optimizer, Rate

Slots = dict[str, Tensor]  # the optimizer state of one leaf
# (gradient, state, parameter, number of the update from 1, rate) -> (change to add to the parameter, state)
Rule = Callable[[Tensor, Slots, Tensor, Tensor, "float | Tensor"], tuple[Tensor, Slots]]


class Change(NamedTuple):
    """The update of one leaf."""

    path: str
    change: Tensor
    param: Tensor
    old: Slots
    new: Slots


def leafwise(
    init_leaf: Callable[[Tensor], Slots],
    rule: Rule,
    lr: Rate,
    *,
    weight_decay: float,
    spec: Tree | None,
    decoupled: bool = True,
    of_matrix: Callable[[Tensor], Tensor] | None = None,
    on_full: OnFull = lambda path, function, x: function(x),
) -> Optimizer:
    """An Optimizer from the update rule of one leaf; the arithmetic is fp32 at least, the state keeps its dtype.

    In place it proceeds leaf by leaf, so that temporary memory is that of one or two leaves.
    decoupled: -rate x weight_decay x parameter is added to the rule's change; False: weight_decay x parameter is added
    to the gradient. lr, spec: as in `adamw`. of_matrix: turns the rule's result, a direction, into the change for a
    rate of -1, matrix by matrix; the rule itself is then elementwise. on_full: how to apply it to shards, as in
    `Optimizer.for_shards`. State: {step, and per name of the rule's state a tree like the parameters, None where a leaf
    has none}. An elementwise rule (`Optimizer`) is marked by `dataclasses.replace`.
    """
    base.check_rate(lr)
    base.check_numbers(weight_decay=weight_decay)
    trainable, decays = base.from_spec(spec)

    def init(params: Tree) -> Tree:
        train = tree.flatten(base.trainable_mask(params, trainable))
        leaves = {path: init_leaf(p) for path, p in tree.flatten(params).items() if train[path]}
        return {"step": base.first_step(params), **_by_name(leaves, params)}

    def changes(grads: Tree, opt_state: Tree, params: Tree) -> Iterator[Change]:
        step = opt_state["step"] + 1
        rate = base.rate_of(lr, step)
        states = {name: tree.flatten(values) for name, values in opt_state.items() if name != "step"}
        flat = tree.flatten(params)
        for path, grad in tree.flatten(base.trainable_only(grads, trainable)).items():
            wide = base.wide_dtype(flat[path].dtype)
            old = {name: values[path] for name, values in states.items() if path in values}
            param, grad = flat[path].to(wide), grad.to(wide)
            decay = weight_decay if decays is None or decays[path] else 0.0
            if decay and not decoupled:
                grad = grad + decay * param
            change, new = rule(grad, {name: s.to(wide) for name, s in old.items()}, param, step, rate)
            if of_matrix is not None:
                change = -rate * on_full(path, of_matrix, change).to(wide)
            if decay and decoupled:
                change = change - rate * decay * param
            yield Change(path, change, flat[path], old, new)

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates: dict[str, Tensor] = {}
        states: dict[str, dict[str, Tensor]] = {name: {} for name in opt_state if name != "step"}
        for made in changes(grads, opt_state, params):
            updates[made.path] = made.change
            for name, old in made.old.items():
                states[name][made.path] = made.new[name].to(old.dtype)
        new = {name: base.with_replaced(opt_state[name], leaves) for name, leaves in states.items()}
        return base.updates_tree(grads, updates), {"step": opt_state["step"] + 1, **new}

    @torch.no_grad()
    def apply_(grads: Tree, opt_state: Tree, params: Tree, *, skip: Tensor | None = None) -> None:
        def write(into: Tensor, value: Tensor) -> None:
            into.copy_(value if skip is None else torch.where(skip, into, value.to(into.dtype)))

        for made in changes(grads, opt_state, params):
            write(made.param, made.param + made.change)
            for name, state in made.old.items():
                write(state, made.new[name])
        opt_state["step"].add_(1 if skip is None else (~skip).to(opt_state["step"]))

    def for_shards(on_full: OnFull) -> Optimizer:
        return leafwise(init_leaf, rule, lr, weight_decay=weight_decay, spec=spec, of_matrix=of_matrix, on_full=on_full)

    return Optimizer(
        init,
        update,
        apply_,
        lambda opt_state: base.rate_of(lr, opt_state["step"] + 1),
        trainable,
        for_shards=None if of_matrix is None else for_shards,
        per_leaf=True,
    )


def _by_name(leaves: dict[str, Slots], params: Tree) -> dict[str, Tree]:
    names = sorted({name for state in leaves.values() for name in state})
    return {name: base.with_paths(lambda path, _, n=name: leaves.get(path, {}).get(n), params) for name in names}  # type: ignore[misc]


def zeros(param: Tensor) -> Tensor:
    """State of a parameter's shape and dtype."""
    return torch.zeros_like(param, memory_format=torch.contiguous_format)

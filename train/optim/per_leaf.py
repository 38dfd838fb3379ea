"""`leafwise`: an Optimizer from an update rule for one leaf, for optimizers that treat leaves independently."""

from __future__ import annotations  # dynamo evaluates no `float | Tensor` where it traces an optimizer being made

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree

from . import base
from .base import InPlace, Number, OnFull, Optimizer, OptimizerTraits, Rate, acts

LeafState = dict[str, Tensor]  # the optimizer state of one leaf
# (gradient, state, parameter, number of the update from 1, rate) -> (change to add to the parameter, state)
LeafRule = Callable[[Tensor, LeafState, Tensor, Tensor, Number], tuple[Tensor, LeafState]]


class TrainableLeaf(NamedTuple):
    """A trainable parameter, the leaf `number` of params, with its state and its weight decay."""

    number: int
    path: str
    param: Tensor
    state: LeafState
    decay: Number


def leaves_of(opt_state: Tree, params: Tree, weight_decay: Number, spec: Tree | None) -> list[TrainableLeaf]:
    """The trainable parameters, in the order of `params`, with their entries of every state but "step"."""
    states = {name: tree.flatten(values) for name, values in opt_state.items() if name != "step"}
    trainable, decays = base.from_spec(spec)
    frozen = base.frozen_paths(trainable)
    found = []
    for number, (path, param) in enumerate(tree.flatten(params).items()):
        if path in frozen or not param.is_floating_point():
            continue
        state = {name: values[path] for name, values in states.items() if path in values}
        decay = weight_decay if decays is None or decays[path] else 0.0
        found.append(TrainableLeaf(number, path, param, state, decay))
    return found


def leafwise(
    init_leaf: Callable[[Tensor], LeafState],
    rule: LeafRule,
    lr: Rate,
    *,
    weight_decay: Number,
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
    `OptimizerTraits.for_shards`. State: {step, and per name of the rule's state a tree like the parameters, an empty
    dict where a leaf has none}. An elementwise rule (`OptimizerTraits`) is marked by `with_traits`.
    """
    base.check_rate(lr)
    base.check_numbers(weight_decay=weight_decay)
    trainable, _ = base.from_spec(spec)

    def init(params: Tree) -> Tree:
        train = tree.flatten(base.trainable_mask(params, trainable))
        leaves = {path: init_leaf(p) for path, p in tree.flatten(params).items() if train[path]}
        return {"step": base.first_step(params), **_by_name(leaves, params)}

    def changed(leaf: TrainableLeaf, grad: Tensor, step: Tensor, rate: Number) -> tuple[Tensor, LeafState]:
        """(what is added to the parameter, the new state)."""
        wide = base.wide_dtype(leaf.param.dtype)
        param, grad = leaf.param.to(wide), grad.to(wide)
        if acts(leaf.decay) and not decoupled:
            grad = grad + leaf.decay * param
        change, new = rule(grad, {name: s.to(wide) for name, s in leaf.state.items()}, param, step, rate)
        if of_matrix is not None:
            change = -rate * on_full(leaf.path, of_matrix, change).to(wide)
        if acts(leaf.decay) and decoupled:
            change = change - rate * leaf.decay * param
        return change, new

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        if params is None:  # which optax takes: there would be no leaf to update
            raise TypeError("An optimizer's update takes (grads, opt_state, params), and params is None.")
        updates: dict[str, Tensor] = {}
        states: dict[str, dict[str, Tensor]] = {name: {} for name in opt_state if name != "step"}
        step, given = opt_state["step"] + 1, tree.flatten(grads)
        rate = base.rate_of(lr, step)
        for leaf in leaves_of(opt_state, params, weight_decay, spec):
            if leaf.path in given:
                updates[leaf.path], made = changed(leaf, given[leaf.path], step, rate)
                for name, old in leaf.state.items():
                    states[name][leaf.path] = made[name].to(old.dtype)
        new = {name: base.with_replaced(opt_state[name], leaves) for name, leaves in states.items()}
        return base.updates_tree(grads, updates), {"step": step, **new}

    def bind(opt_state: Tree, params: Tree) -> InPlace:
        leaves, count = leaves_of(opt_state, params, weight_decay, spec), opt_state["step"]

        @torch.no_grad()
        def run(grads: Sequence[Tensor | None], skip: Tensor | None) -> None:
            def write(into: Tensor, value: Tensor) -> None:
                into.copy_(value if skip is None else torch.where(skip, into, value.to(into.dtype)))

            step = count + 1
            rate = base.rate_of(lr, step)
            for leaf in leaves:
                grad = grads[leaf.number]
                if grad is not None:
                    change, new = changed(leaf, grad, step, rate)
                    write(leaf.param, leaf.param + change)
                    for name, state in leaf.state.items():
                        write(state, new[name])
            base.count_up_(count, skip)

        return run

    def for_shards(on_full: OnFull) -> Optimizer:
        return leafwise(init_leaf, rule, lr, weight_decay=weight_decay, spec=spec, of_matrix=of_matrix, on_full=on_full)

    traits = OptimizerTraits(
        lr=lambda opt_state: base.next_rate(lr, opt_state["step"]),
        trainable=trainable,
        for_shards=None if of_matrix is None else for_shards,
        per_leaf=True,
    )
    return Optimizer(init, update, bind, traits)


def _by_name(leaves: dict[str, LeafState], params: Tree) -> dict[str, Tree]:
    names = sorted({name for state in leaves.values() for name in state})
    return {name: base.with_paths(lambda path, _, n=name: leaves.get(path, {}).get(n, {}), params) for name in names}  # type: ignore[misc]


def zeros(param: Tensor) -> Tensor:
    """State of a parameter's shape and dtype."""
    return torch.zeros_like(param, memory_format=torch.contiguous_format)

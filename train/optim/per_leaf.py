"""Optimizers whose update of a leaf needs nothing but that leaf: everything around the rule, written once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree

from .base import (
    Optimizer,
    Rate,
    Whole,
    check_numbers,
    check_rate,
    first_step,
    from_spec,
    like,
    of_learning,
    rate_at,
    renewed,
    trainable_mask,
    wide_dtype,
    with_paths,
)

State = dict[str, Tensor]
# (gradient, state, parameter, number of the update from 1, rate) -> (what to add to the parameter, state)
Rule = Callable[[Tensor, State, Tensor, Tensor, "float | Tensor"], tuple[Tensor, State]]


class Change(NamedTuple):
    """What an update does to one leaf."""

    path: str
    change: Tensor
    param: Tensor
    old: State
    new: State


def leafwise(
    init_leaf: Callable[[Tensor], State],
    rule: Rule,
    lr: Rate,
    *,
    weight_decay: float,
    spec: Tree | None,
    elementwise: bool = False,
    of_whole: Callable[[Tensor], Tensor] | None = None,
    whole: Whole = lambda path, function, x: function(x),
) -> Optimizer:
    """An Optimizer from what happens to one leaf; the arithmetic is fp32 at least, the state keeps its dtype.

    In place it goes leaf by leaf, so that what it holds beside parameters and state is of one or two.
    Decoupled weight decay, -rate x weight_decay x parameter, comes on top of the rule. lr, spec: as in `adamw`.
    elementwise: see `Optimizer`. of_whole: turns what the rule returns, a direction, into the change for a rate of -1,
    matrix by matrix; the rule itself is then elementwise. whole: how that is done to parts, as in `Optimizer.of_parts`.
    State: {step, and per name of the rule's state a tree like the parameters', None where a leaf has none}.
    """
    check_rate(lr)
    check_numbers(weight_decay=weight_decay)
    trainable, decays = from_spec(spec)

    def init(params: Tree) -> Tree:
        train = tree.flatten(trainable_mask(params, trainable))
        leaves = {path: init_leaf(p) for path, p in tree.flatten(params).items() if train[path]}
        return {"step": first_step(params), **_by_name(leaves, params)}

    def changes(grads: Tree, opt_state: Tree, params: Tree) -> Iterator[Change]:
        step = opt_state["step"] + 1
        rate = rate_at(lr, step)
        states = {name: tree.flatten(values) for name, values in opt_state.items() if name != "step"}
        flat = tree.flatten(params)
        for path, grad in tree.flatten(of_learning(grads, trainable)).items():
            wide = wide_dtype(flat[path].dtype)
            old = {name: values[path] for name, values in states.items() if path in values}
            param = flat[path].to(wide)
            change, new = rule(grad.to(wide), {name: s.to(wide) for name, s in old.items()}, param, step, rate)
            if of_whole is not None:
                change = -rate * whole(path, of_whole, change).to(wide)
            if weight_decay and (decays is None or decays[path]):
                change = change - rate * weight_decay * param
            yield Change(path, change, flat[path], old, new)

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates: dict[str, Tensor] = {}
        states: dict[str, dict[str, Tensor]] = {name: {} for name in opt_state if name != "step"}
        for made in changes(grads, opt_state, params):
            updates[made.path] = made.change
            for name, old in made.old.items():
                states[name][made.path] = made.new[name].to(old.dtype)
        new = {name: renewed(opt_state[name], leaves) for name, leaves in states.items()}
        return like(grads, updates), {"step": opt_state["step"] + 1, **new}

    @torch.no_grad()
    def apply_(grads: Tree, opt_state: Tree, params: Tree, *, skip: Tensor | None = None) -> None:
        def write(into: Tensor, value: Tensor) -> None:
            into.copy_(value if skip is None else torch.where(skip, into, value.to(into.dtype)))

        for made in changes(grads, opt_state, params):
            write(made.param, made.param + made.change)
            for name, state in made.old.items():
                write(state, made.new[name])
        opt_state["step"].add_(1 if skip is None else (~skip).to(opt_state["step"]))

    def of_parts(whole: Whole) -> Optimizer:
        return leafwise(init_leaf, rule, lr, weight_decay=weight_decay, spec=spec, of_whole=of_whole, whole=whole)

    return Optimizer(
        init,
        update,
        apply_,
        lambda opt_state: rate_at(lr, opt_state["step"] + 1),
        trainable,
        elementwise=elementwise,
        of_parts=None if of_whole is None else of_parts,
    )


def _by_name(leaves: dict[str, State], params: Tree) -> dict[str, Tree]:
    names = sorted({name for state in leaves.values() for name in state})
    return {name: with_paths(lambda path, _, n=name: leaves.get(path, {}).get(n), params) for name in names}  # type: ignore[misc]


def zeros(param: Tensor) -> Tensor:
    """State of a parameter's shape and dtype."""
    return torch.zeros_like(param, memory_format=torch.contiguous_format)

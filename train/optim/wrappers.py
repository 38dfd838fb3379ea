"""Wrappers around optimizers: one per group of leaves, an average of the weights, fp32 copies of bf16 weights."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.ops.torch_internals import transformed
from fnmodels.tree import Tree
from params.sharding import is_stage_share

from . import base
from .base import InPlace, Optimizer, with_paths
from .patterns import Patterns, check_used, first_match, patterns_of


def partition(groups: Mapping[str, Optimizer | None]) -> Optimizer:
    """Assigns an optimizer to each leaf, by the first pattern that its dotted path matches.

    Each group has its own rate: in the metrics of a step `lr` is that of the first, and `lr_of` has one for each
    pattern. State: a list, one per optimizer in the given order.

    Args:
        groups: {pattern: optimizer}; None freezes the leaves. Patterns are shell patterns (`fnmatch`) over the full
            path: "layers.*.attention.*", "*norm*", "*".

    Returns:
        The optimizer.

    Raises:
        ValueError: There is no optimizer. By `init`: a leaf matches no pattern, or a pattern has no leaf in the model
            (over pipeline stages: in that of all stages).
    """
    trained = {pattern: optimizer for pattern, optimizer in groups.items() if optimizer is not None}
    if not trained:
        raise ValueError("partition needs at least one optimizer.")
    optimizers, patterns = list(trained.values()), patterns_of(groups)

    def init(params: Tree) -> Tree:
        if not is_stage_share(params):
            _check_groups(groups, tree.flatten(params))
        pruned = _parts(params, trained, _assigned(patterns, params))
        with next(iter(tree.leaves(params))).device:  # for the step count of a group without a leaf on this stage
            return [optimizer.init(pruned[pattern]) for pattern, optimizer in trained.items()]

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        assigned = _assigned(patterns, params)
        pruned, given = (_parts(values, trained, assigned) for values in (params, grads))
        updates: dict[str, Tensor] = {}
        states = []
        for (pattern, optimizer), state in zip(trained.items(), opt_state, strict=True):
            change, state = optimizer.update(given[pattern], state, pruned[pattern])
            updates |= tree.flatten(change)
            states.append(state)
        return base.updates_tree(grads, updates), states

    def bind(opt_state: Tree, params: Tree) -> InPlace:
        assigned = _assigned(patterns, params)
        pruned = _parts(params, trained, assigned)
        runs: list[tuple[list[int], InPlace]] = []
        for (pattern, optimizer), state in zip(trained.items(), opt_state, strict=True):
            assert optimizer.bind is not None
            indices = [index for index, of in enumerate(assigned.values()) if of == pattern]
            runs.append((indices, optimizer.bind(state, pruned[pattern])))

        def run(grads: Sequence[Tensor | None], skip: Tensor | None) -> None:
            for indices, run_group in runs:
                run_group([grads[index] for index in indices], skip)

        return run

    def trainable(params: Tree) -> Tree:
        mask = dict.fromkeys(tree.flatten(params), False)
        for pattern, part in _parts(params, trained, _assigned(patterns, params)).items():
            mask |= tree.flatten(base.trainable_mask(part, trained[pattern].traits.trainable))
        return with_paths(lambda path, _: mask[path], params)

    def rates(opt_state: Tree) -> dict[str, float | Tensor]:
        pairs = zip(trained.items(), opt_state, strict=True)
        return {pattern: one.traits.lr(state) for (pattern, one), state in pairs if one.traits.lr is not None}

    def again(*others: Optimizer) -> Optimizer:
        return partition({**groups, **dict(zip(trained, others, strict=True))})

    traits = replace(
        base.combine(optimizers, 0, lambda opt_state: opt_state[0], again),
        trainable=trainable,
        rates=rates,
        remake=None,
        check_paths=functools.partial(_check_groups, groups),
    )
    in_place = all(optimizer.bind is not None for optimizer in optimizers)
    return Optimizer(init, update, bind if in_place else None, traits)


def _assigned_to(patterns: Patterns, paths: Iterable[str]) -> dict[str, str]:
    """{path: its pattern}. ValueError for a path without one."""
    matches = {path: first_match(path, patterns) for path in paths}
    lost = [path for path, pattern in matches.items() if pattern is None]
    if lost:
        raise ValueError(f"No pattern of {list(patterns)} matches {lost[0]} ({len(lost)} such leaves).")
    return {path: pattern for path, pattern in matches.items() if pattern is not None}


def _assigned(patterns: Patterns, params: Tree) -> dict[str, str]:
    return _assigned_to(patterns, tree.flatten(params))


def _check_groups(groups: Mapping[str, Optimizer | None], paths: Iterable[str]) -> None:
    """`OptimizerTraits.check_paths` of `partition`."""
    assigned = _assigned_to(patterns_of(groups), paths)
    check_used(groups, assigned.values(), assigned)
    for pattern, optimizer in groups.items():
        if optimizer is not None and optimizer.traits.check_paths is not None:
            optimizer.traits.check_paths([path for path in assigned if assigned[path] == pattern])


def _parts(values: Tree, patterns: Iterable[str], assigned: dict[str, str]) -> dict[str, Tree]:
    """The same tree once per pattern, with an empty dict at the leaves of the other patterns."""
    return {
        p: with_paths(lambda path, leaf, p=p: leaf if assigned[path] == p else {}, values)  # type: ignore[misc]
        for p in patterns
    }


def with_ema(optimizer: Optimizer, decay: base.Number) -> Optimizer:
    """Keeps an exponential moving average (EMA) of the trainable weights: opt_state["ema"], fp32 at least.

    ema = decay x ema + (1 - decay) x parameter after each update; it begins at the parameters. Frozen leaves have an
    empty dict there: `averaged` merges the two. State: {inner, ema}.

    Args:
        optimizer: The optimizer that computes the updates.
        decay: The share of the old average, at least 0 and below 1; a 0-d tensor may be mapped or differentiated.

    Returns:
        The optimizer around the other.

    Raises:
        ValueError: The decay is out of range.
    """
    base.check_below_1(decay=decay)

    def init(params: Tree) -> Tree:
        train = base.trainable_mask(params, optimizer.traits.trainable)
        return {
            "inner": optimizer.init(params),
            "ema": tree.map(lambda p, trains: _wide_copy(p) if trains else {}, params, train),
        }

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, inner = optimizer.update(grads, opt_state["inner"], params)
        new = tree.flatten(base.apply_updates(params, updates))
        ema = with_paths(lambda path, e: e.lerp(new[path].to(e.dtype), base.weight_for(1 - decay, e)), opt_state["ema"])
        return updates, {"inner": inner, "ema": ema}

    def bind(opt_state: Tree, params: Tree) -> InPlace:
        run_inner, flat = _bound(optimizer, opt_state, params), tree.flatten(params)
        pairs = [(e, flat[path]) for path, e in tree.flatten(opt_state["ema"]).items()]

        @torch.no_grad()
        def run(grads: Sequence[Tensor | None], skip: Tensor | None) -> None:
            run_inner(grads, skip)
            for e, param in pairs:
                after = e.lerp(param.to(e.dtype), base.weight_for(1 - decay, e))
                e.copy_(after if skip is None else torch.where(skip, e, after))  # a lerp by 0 would turn -0 into 0

        return run

    return around(optimizer, init, update, bind, lambda inner: with_ema(inner, decay))


def averaged(params: Tree, ema: Tree) -> Tree:
    """The parameters with trainable leaves replaced by their averages.

    Args:
        params: The tree of parameters.
        ema: opt_state["ema"] of `with_ema`.

    Returns:
        The merged tree, for evaluation and for saving.
    """
    return _overlaid(params, ema)


def _overlaid(params: Tree, some: Tree) -> Tree:
    """The parameters with leaves replaced by those of `some`, where it is not None."""
    found = tree.flatten(some)
    return with_paths(lambda path, p: found.get(path, p), params)


def with_master(optimizer: Optimizer) -> Optimizer:
    """Updates an fp32 copy of each trainable bf16 parameter; the parameter is that copy, rounded (arXiv 1710.03740).

    bf16 has 8 bits: without the copy an update below 1/256 of a weight is lost. Moments are fp32 too. fp32 parameters
    are updated directly, and frozen ones have no copy. State: {inner, master}, an empty dict in master where none is.
    The pure update is rounded - parameter in fp32; adding it gives the rounded bits unless a parameter becomes 2^16
    times smaller at once.

    Args:
        optimizer: The optimizer that computes the updates, in fp32.

    Returns:
        The optimizer around the other.
    """

    def init(params: Tree) -> Tree:
        train = base.trainable_mask(params, optimizer.traits.trainable)
        master = tree.map(lambda p, t: _wide_copy(p) if t and p.dtype != _wide(p) else {}, params, train)
        return {"inner": optimizer.init(_overlaid(params, master)), "master": master}

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        wide, kept = _overlaid(params, opt_state["master"]), opt_state["master"]
        changes, inner = optimizer.update(tree.map(widened, grads), opt_state["inner"], wide)
        new, old, own = (tree.flatten(t) for t in (base.apply_updates(wide, changes), params, kept))

        def rounded(path: str, change: Tensor) -> Tensor:
            if path not in own:
                return change
            return new[path].to(old[path].dtype).to(new[path].dtype) - old[path].to(new[path].dtype)

        return with_paths(rounded, changes), {"inner": inner, "master": with_paths(lambda path, _: new[path], kept)}

    def bind(opt_state: Tree, params: Tree) -> InPlace:
        flat, masters = tree.flatten(params), tree.flatten(opt_state["master"])
        run_inner = _bound(optimizer, opt_state, _overlaid(params, opt_state["master"]))

        @torch.no_grad()
        def run(grads: Sequence[Tensor | None], skip: Tensor | None) -> None:
            run_inner([None if grad is None else widened(grad) for grad in grads], skip)
            for path, master in masters.items():
                flat[path].copy_(master)

        return run

    return around(optimizer, init, update, bind, with_master)


def around(
    optimizer: Optimizer,
    init: Callable[[Tree], Tree],
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
    bind: Callable[[Tree, Tree], InPlace],
    again: Callable[[Optimizer], Optimizer],
) -> Optimizer:
    """An optimizer around another, whose state is under "inner"; rates and trainable leaves are the other's.

    again: puts the same wrapper around another version of it.
    """
    traits = base.combine([optimizer], 0, lambda opt_state: opt_state["inner"], again)
    return Optimizer(init, update, None if optimizer.bind is None else bind, traits)


def _bound(optimizer: Optimizer, opt_state: Tree, params: Tree) -> InPlace:
    """`Optimizer.bind` of the optimizer inside."""
    assert optimizer.bind is not None
    return optimizer.bind(opt_state["inner"], params)


def _wide_copy(param: Tensor) -> Tensor:
    return (param if transformed() else param.detach()).to(_wide(param), copy=True)


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(_wide(tensor))


def _wide(tensor: Tensor) -> torch.dtype:
    return base.wide_dtype(tensor.dtype) if tensor.is_floating_point() else tensor.dtype

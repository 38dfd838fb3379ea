"""Wrappers around optimizers: one per group of leaves, an average of the weights, fp32 copies of bf16 weights."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree
from params.sharding import is_stage_share

from . import base
from .base import OnFull, Optimizer, with_paths
from .patterns import check_used, first_match


def partition(groups: Mapping[str, Optimizer | None]) -> Optimizer:
    """{pattern: optimizer}: each leaf goes to the first pattern that its dotted path matches; None freezes it.

    Patterns are shell patterns (`fnmatch`) over the full path: "layers.*.attention.*", "*norm*", "*". ValueError for a
    leaf that matches none, or a pattern without a leaf in the model (over pipeline stages: in that of all stages).
    Each group has its own rate: in the metrics of a step `lr` is that of the first, and `lr_of` has one for each
    pattern. State: a list, one per optimizer in the given order.
    """
    trained = {pattern: optimizer for pattern, optimizer in groups.items() if optimizer is not None}
    if not trained:
        raise ValueError("partition needs at least one optimizer.")

    def assigned_to(paths: Iterable[str]) -> dict[str, str]:
        found = {path: first_match(path, groups) for path in paths}
        lost = [path for path, pattern in found.items() if pattern is None]
        if lost:
            raise ValueError(f"No pattern of {list(groups)} matches {lost[0]} ({len(lost)} such leaves).")
        return {path: pattern for path, pattern in found.items() if pattern is not None}

    def check_paths(paths: Iterable[str]) -> None:
        assigned = assigned_to(paths)
        check_used(groups, assigned.values(), assigned)
        for pattern, optimizer in trained.items():
            if optimizer.check_paths is not None:
                optimizer.check_paths([path for path in assigned if assigned[path] == pattern])

    def assign(params: Tree) -> dict[str, str]:
        return assigned_to(tree.flatten(params))

    def parts(values: Tree, assigned: dict[str, str]) -> dict[str, Tree]:
        """The same tree once per optimizer, with None at the other optimizers' leaves."""
        return {
            p: with_paths(lambda path, leaf, p=p: leaf if assigned[path] == p else None, values)  # type: ignore[misc]
            for p in trained
        }

    def init(params: Tree) -> Tree:
        if not is_stage_share(params):
            check_paths(tree.flatten(params))
        pruned = parts(params, assign(params))
        with next(iter(tree.leaves(params))).device:  # for the step count of a group without a leaf on this stage
            return [optimizer.init(pruned[pattern]) for pattern, optimizer in trained.items()]

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        assigned = assign(params)
        ours, given = parts(params, assigned), parts(grads, assigned)
        updates: dict[str, Tensor] = {}
        states = []
        for (pattern, optimizer), state in zip(trained.items(), opt_state, strict=True):
            change, state = optimizer.update(given[pattern], state, ours[pattern])
            updates |= tree.flatten(change)
            states.append(state)
        return base.updates_tree(grads, updates), states

    def apply_(grads: Tree, opt_state: Tree, params: Tree, *, skip: Tensor | None = None) -> None:
        assigned = assign(params)
        ours, given = parts(params, assigned), parts(grads, assigned)
        for (pattern, optimizer), state in zip(trained.items(), opt_state, strict=True):
            assert optimizer.apply_ is not None
            optimizer.apply_(given[pattern], state, ours[pattern], skip=skip)

    def trainable(params: Tree) -> Tree:
        found = dict.fromkeys(tree.flatten(params), False)
        for pattern, part in parts(params, assign(params)).items():
            found |= tree.flatten(base.trainable_mask(part, trained[pattern].trainable))
        return with_paths(lambda path, _: found[path], params)

    in_place = all(optimizer.apply_ is not None for optimizer in trained.values())
    rate = next(iter(trained.values())).lr
    lr = None if rate is None else lambda opt_state: rate(opt_state[0])

    def rates(opt_state: Tree) -> dict[str, float | Tensor]:
        pairs = zip(trained.items(), opt_state, strict=True)
        return {pattern: optimizer.lr(state) for (pattern, optimizer), state in pairs if optimizer.lr is not None}

    elementwise = all(optimizer.elementwise for optimizer in trained.values())

    def for_shards(on_full: OnFull) -> Optimizer:
        return partition({pattern: own and base.sharded_version(own, on_full) for pattern, own in groups.items()})

    parted = for_shards if all(base.supports_shards(optimizer) for optimizer in trained.values()) else None
    own_leaf = all(optimizer.elementwise or optimizer.per_leaf for optimizer in trained.values())
    own_apply = apply_ if in_place else None
    kinds: dict[str, Any] = {"elementwise": elementwise, "per_leaf": own_leaf, "check_paths": check_paths}
    return Optimizer(init, update, own_apply, lr, trainable, rates, for_shards=parted, **kinds)


def with_ema(optimizer: Optimizer, decay: float) -> Optimizer:
    """Keeps an exponential moving average (EMA) of the trainable weights: opt_state["ema"], fp32 at least.

    ema = decay x ema + (1 - decay) x parameter after each update; it begins at the parameters. Frozen leaves have
    None there: `averaged` merges the two. State: {inner, ema}.
    """
    base.check_below_1(decay=decay)

    def init(params: Tree) -> Tree:
        train = base.trainable_mask(params, optimizer.trainable)
        return {
            "inner": optimizer.init(params),
            "ema": tree.map(lambda p, trains: _wide_copy(p) if trains else None, params, train),
        }

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, inner = optimizer.update(grads, opt_state["inner"], params)
        new = tree.flatten(base.apply_updates(params, updates))
        ema = with_paths(lambda path, e: e.lerp(new[path].to(e.dtype), 1 - decay), opt_state["ema"])
        return updates, {"inner": inner, "ema": ema}

    @torch.no_grad()
    def apply_(grads: Tree, opt_state: Tree, params: Tree, *, skip: Tensor | None = None) -> None:
        assert optimizer.apply_ is not None
        optimizer.apply_(grads, opt_state["inner"], params, skip=skip)
        new = tree.flatten(params)
        for path, e in tree.flatten(opt_state["ema"]).items():
            after = e.lerp(new[path].to(e.dtype), 1 - decay)
            e.copy_(after if skip is None else torch.where(skip, e, after))  # a lerp by 0 would turn -0 into 0

    return around(optimizer, init, update, apply_, lambda inner: with_ema(inner, decay))


def averaged(params: Tree, ema: Tree) -> Tree:
    """The parameters with trainable leaves replaced by the averages of `with_ema`, opt_state["ema"]."""
    return _overlaid(params, ema)


def _overlaid(params: Tree, some: Tree) -> Tree:
    """The parameters with leaves replaced by those of `some`, where it is not None."""
    found = tree.flatten(some)
    return with_paths(lambda path, p: found.get(path, p), params)


def with_master(optimizer: Optimizer) -> Optimizer:
    """Updates an fp32 copy of each trainable bf16 parameter; the parameter is that copy, rounded.

    bf16 has 8 bits: without the copy an update below 1/256 of a weight is lost. Moments are fp32 too. fp32 parameters
    are updated directly, and frozen ones have no copy. State: {inner, master}, None in master where there is none.
    The pure update is rounded - parameter in fp32; adding it gives the rounded bits unless a parameter becomes 2^16
    times smaller at once.
    """

    def init(params: Tree) -> Tree:
        train = base.trainable_mask(params, optimizer.trainable)
        master = tree.map(lambda p, t: _wide_copy(p) if t and p.dtype != _wide(p) else None, params, train)
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

    @torch.no_grad()
    def apply_(grads: Tree, opt_state: Tree, params: Tree, *, skip: Tensor | None = None) -> None:
        assert optimizer.apply_ is not None
        wide = _overlaid(params, opt_state["master"])
        optimizer.apply_(tree.map(widened, grads), opt_state["inner"], wide, skip=skip)
        flat = tree.flatten(params)
        for path, master in tree.flatten(opt_state["master"]).items():
            flat[path].copy_(master)

    return around(optimizer, init, update, apply_, with_master)


def around(
    optimizer: Optimizer,
    init: Callable[[Tree], Tree],
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]],
    apply_: Callable[..., None],
    again: Callable[[Optimizer], Optimizer] | None = None,
) -> Optimizer:
    """An optimizer around another, whose state is under "inner"; rates and trainable leaves are the other's.

    again: puts the same wrapper around the version for shards; None: only full leaves are supported.
    """
    inner, inner_rates = optimizer.lr, optimizer.rates
    lr = None if inner is None else lambda opt_state: inner(opt_state["inner"])
    rates = None if inner_rates is None else lambda opt_state: inner_rates(opt_state["inner"])
    own, other = apply_ if optimizer.apply_ is not None else None, optimizer.for_shards
    parted = None if other is None or again is None else lambda on_full: again(other(on_full))
    remade = None if again is None or optimizer.remake is None else lambda **v: again(base.remake(optimizer, **v))
    kinds: dict[str, Any] = {"elementwise": optimizer.elementwise, "per_leaf": optimizer.per_leaf}
    kinds["check_paths"] = optimizer.check_paths
    return Optimizer(init, update, own, lr, optimizer.trainable, rates, for_shards=parted, remake=remade, **kinds)


def _wide_copy(param: Tensor) -> Tensor:
    return param.detach().to(_wide(param), copy=True)


def widened(tensor: Tensor) -> Tensor:
    return tensor.to(_wide(tensor))


def _wide(tensor: Tensor) -> torch.dtype:
    return base.wide_dtype(tensor.dtype) if tensor.is_floating_point() else tensor.dtype

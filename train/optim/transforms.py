"""Gradient transforms before an optimizer: `chain` passes the result of each to the next."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree
from params.sharding import is_stage_share

from .base import InPlace, Optimizer, clip_by_global_norm, combine, is_unknown_or, with_paths, with_traits
from .patterns import check_used, first_match, patterns_of


def chain(*transforms: Optimizer) -> Optimizer:
    """An Optimizer from several: each `update` gives the gradients of the next; the updates of the last are added.

        optimizer = chain(clip_norm(1.0), adamw(3e-4))

    A transform is an Optimizer whose `update` returns gradients; see `clip_norm` and `masked`. Within `partition` it
    belongs to one group. State: a list, one per transform.

    Args:
        *transforms: The transforms in order; the last one is an optimizer, whose rates, trainable leaves and in-place
            step are those of the result.

    Returns:
        The optimizer.

    Raises:
        ValueError: There is none.
    """
    if not transforms:
        raise ValueError("chain needs at least one transform; the last one is an optimizer.")
    *before, last = transforms

    def init(params: Tree) -> Tree:
        return [transform.init(params) for transform in transforms]

    def transformed(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, list[Tree]]:
        states = []
        for transform, state in zip(before, opt_state[:-1], strict=True):
            grads, state = transform.update(grads, state, params)
            states.append(state)
        return grads, states

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        grads, states = transformed(grads, opt_state, params)
        updates, state = last.update(grads, opt_state[-1], params)
        return updates, [*states, state]

    def bind(opt_state: Tree, params: Tree) -> InPlace:
        assert last.bind is not None
        paths, states = list(tree.flatten(params)), tree.leaves(opt_state[:-1])
        run_last = last.bind(opt_state[-1], params)

        @torch.no_grad()
        def run(grads: Sequence[Tensor | None], skip: Tensor | None) -> None:
            values = iter(grads)
            changed, after = transformed(tree.map(lambda _: next(values), params), opt_state, params)
            for old, new in zip(states, tree.leaves(after), strict=True):
                old.copy_(new if skip is None else torch.where(skip, old, new))
            flat = tree.flatten(changed)
            run_last([flat.get(path) for path in paths], skip)

        return run

    traits = combine(transforms, len(before), lambda opt_state: opt_state[-1], chain)
    return Optimizer(init, update, None if last.bind is None else bind, traits)


def clip_norm(limit: float | Tensor) -> Optimizer:
    """A transform that scales gradients down so that their norm over all leaves is at most `limit`. It has no state.

    `make_step(..., clip=)` does the same for all parameters and costs less; this one is for a single group. It is not
    elementwise: over a mesh that shards parameters or layers (`pp`) only the step's clip is right, and this one is
    refused.

    Args:
        limit: The largest norm.

    Returns:
        The transform, for `chain`.

    Raises:
        ValueError: The limit is not above 0.
    """
    if not is_unknown_or(limit, lambda x: x > 0):
        raise ValueError(f"limit is {limit}; it must be above 0.")
    return Optimizer(lambda params: {}, lambda grads, state, params: (clip_by_global_norm(grads, limit)[0], state))


def masked(transform: Optimizer, *patterns: str) -> Optimizer:
    """A transform of some leaves; the gradients of others are unchanged.

        optimizer = chain(masked(clip_norm(0.1), "embed_*", "lm_head"), adamw(3e-4))

    State: the transform's, an empty dict at other leaves. For leaves that need another optimizer, or none, use
    `partition`: here their raw gradients would be added to them.

    Args:
        transform: A transform such as `clip_norm`.
        *patterns: Shell patterns over dotted paths, as in `partition`; a leaf that one of them matches is transformed.

    Returns:
        The transform, for `chain`.

    Raises:
        ValueError: There is no pattern, one matches no leaf of the model (by `init`), or the masked one is an
            optimizer.
    """
    if not patterns:
        raise ValueError("masked needs at least one pattern.")
    if transform.traits.lr is not None:
        raise ValueError("masked is for transforms before an optimizer; train.partition assigns optimizers to leaves.")

    known_patterns = patterns_of(patterns)

    def own(values: Tree) -> Tree:
        return with_paths(lambda path, leaf: {} if first_match(path, known_patterns) is None else leaf, values)

    def check_paths(paths: Iterable[str]) -> None:
        known = list(paths)
        used = {text for text, pattern in known_patterns.items() if any(map(pattern.match, known))}
        check_used(patterns, used, known)

    def init(params: Tree) -> Tree:
        if not is_stage_share(params):
            check_paths(tree.flatten(params))
        return transform.init(own(params))

    def update(grads: Tree, opt_state: Tree, params: Tree) -> tuple[Tree, Tree]:
        changed, state = transform.update(own(grads), opt_state, own(params))
        flat = tree.flatten(changed)
        return with_paths(lambda path, grad: flat.get(path, grad), grads), state

    made = Optimizer(init, update, traits=combine([transform], 0, lambda opt_state: opt_state))
    return with_traits(made, trainable=None, check_paths=check_paths)

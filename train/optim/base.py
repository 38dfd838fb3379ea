"""The `Optimizer` type, a pair of functions over trees in the style of optax, and helpers of all optimizers.

    optimizer = train.adamw(3e-4, weight_decay=0.1, spec=family.spec(config))
    opt_state = optimizer.init(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = apply_updates(params, updates)

`update` is compatible with vmap, grad and compile; the form in place takes a fraction of the time. A frozen leaf has an
empty dict in the moments and in `updates`, whatever `grads` has for it, since vmap takes no None. A leaf with None or
an empty dict in `grads` keeps its state and gets no update.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.inputs.values import has_values
from fnmodels.ops.torch_internals import vector_norms
from fnmodels.tree import Tree

Number = float | Tensor  # a tensor is 0-d, as of a caller that differentiates the update or maps it
Rate = Number | Callable[[Tensor], Number]
# on_full(path, function, x): x is a shard of the matrices [.., out, in] of the leaf at `path`; returns the same shard
# of function(full matrices)
OnFull = Callable[[str, Callable[[Tensor], Tensor], Tensor], Tensor]
InPlace = Callable[[Sequence[Tensor | None], Tensor | None], None]  # (gradients, skip), see `Optimizer.bind`


@dataclass(frozen=True)
class OptimizerTraits:
    """Properties of an optimizer, beside its functions, that a train step reads; `combine` makes those of a wrapper.

    lr(opt_state) -> the rate of the next update, for the metrics.
    rates(opt_state) -> {name: rate} of its groups, if it has several.
    trainable: a tree of bools over the parameters, or a function that makes it from them; None: every floating leaf is
        trainable.
    elementwise: whether the update of an element depends on that element, its gradient and its state alone, so that a
        shard of a leaf can be updated by itself.
    per_leaf: whether the update of a leaf depends on that leaf alone (elementwise implies it), so that a pipeline stage
        can update its own. An optimizer without it is refused over `pp`.
    for_shards(on_full) -> the same optimizer for sharded leaves, if it needs functions of full matrices. An optimizer
        that has none and is not elementwise is refused for sharded parameters.
    remake(**values) -> the same optimizer for the same state, with other hyperparameters (see `remake`); None: it has
        none that can be replaced.
    check_paths(paths): ValueError for the paths of all leaves of a model which its patterns do not fit; None: it has no
        patterns. `init` of a pipeline stage's params does not check them.
    """

    lr: Callable[[Tree], float | Tensor] | None = None
    rates: Callable[[Tree], dict[str, float | Tensor]] | None = None
    trainable: Tree | Callable[[Tree], Tree] | None = None
    elementwise: bool = False
    per_leaf: bool = False
    for_shards: Callable[[OnFull], Optimizer] | None = None
    remake: Callable[..., Optimizer] | None = None
    check_paths: Callable[[Iterable[str]], None] | None = None


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as train steps call it: one of your own is `train.Optimizer(init, update)`, two pure functions.

        def init(params): return {"sum": tree.map(torch.zeros_like, params)}
        def update(grads, opt_state, params): ...           # {} in grads: a parameter that is not trained
        step = train.make_step(loss_fn, train.Optimizer(init, update))

    Args:
        init: (params) -> opt_state, which keeps its structure through all updates.
        update: (grads, opt_state, params) -> (updates, opt_state), pure; `updates` are to be added to the parameters.
        bind: (opt_state, params) -> run(grads, skip), which updates these tensors in place, as often as it is called.
            It takes a gradient or None for each leaf of params, in their order. If the 0-d bool tensor `skip` is True,
            every tensor keeps its bits, without a wait of the host. None: the step uses `update`.
        traits: What a step may know beside these functions: rates for the metrics, what is trainable, whether it can
            run on shards.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    bind: Callable[[Tree, Tree], InPlace] | None = None
    traits: OptimizerTraits = OptimizerTraits()

    def apply_(self, grads: Tree, opt_state: Tree, params: Tree, *, skip: Tensor | None = None) -> None:
        """One update in place, of an optimizer that has `bind`.

        Args:
            grads: The tree of gradients, as `update` takes it.
            opt_state: The state, which is overwritten.
            params: The parameters, which are overwritten.
            skip: 0-d bool; if it is True, every tensor keeps its bits. None: the update is made.
        """
        assert self.bind is not None
        flat = tree.flatten(grads)
        self.bind(opt_state, params)([flat.get(path) for path in tree.flatten(params)], skip)


def combine(
    parts: Sequence[Optimizer],
    main: int,
    state_of: Callable[[Tree], Tree],
    again: Callable[..., Optimizer] | None = None,
) -> OptimizerTraits:
    """The traits of an optimizer made of others.

    Args:
        parts: the others.
        main: the index of the one whose rates, trainable parameters and hyperparameters are those of the result.
        state_of: opt_state of the result -> that of this one.
        again: makes the same of other versions of the parts, with other hyperparameters or for shards; None: the result
            has neither.
    """
    traits = [part.traits for part in parts]
    chosen, before, after = traits[main], parts[:main], parts[main:][1:]

    def check_paths(paths: Iterable[str]) -> None:
        known = list(paths)
        for one in traits:
            if one.check_paths is not None:
                one.check_paths(known)

    def of_main(function: Callable[[Tree], Any] | None) -> Callable[[Tree], Any] | None:
        return None if function is None else lambda opt_state: function(state_of(opt_state))

    def for_shards(on_full: OnFull) -> Optimizer:
        assert again is not None
        return again(*(sharded_version(part, on_full) for part in parts))

    def remade(**values: Any) -> Optimizer:
        assert again is not None
        return again(*before, remake(parts[main], **values), *after)

    return OptimizerTraits(
        lr=of_main(chosen.lr),
        rates=of_main(chosen.rates),
        trainable=chosen.trainable,
        elementwise=all(one.elementwise for one in traits),
        per_leaf=all(one.elementwise or one.per_leaf for one in traits),
        for_shards=for_shards if again is not None and all(map(supports_shards, parts)) else None,
        remake=remade if again is not None and chosen.remake is not None else None,
        check_paths=check_paths if any(one.check_paths is not None for one in traits) else None,
    )


def check_optimizer(optimizer: Any) -> None:
    """TypeError for what is no `Optimizer`."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"The optimizer is a {type(optimizer).__name__}; it must be a train.Optimizer, as train.adamw(1e-3) makes "
            "one, or train.Optimizer(init, update) of two functions of your own."
        )


def remake(optimizer: Optimizer, /, **values: Any) -> Optimizer:
    """The optimizer with these hyperparameters (lr, betas, weight_decay, ...) replaced; its state stays valid.

    ValueError for one that it does not have.
    """
    if not values:
        return optimizer
    if optimizer.traits.remake is None:
        raise ValueError(
            f"This optimizer has no single {next(iter(values))} to replace (partition has one per group, and a custom "
            "train.Optimizer needs `remake`): assign engine.optimizer instead."
        )
    return optimizer.traits.remake(**values)


def remaker(make: Callable[..., Optimizer], **values: Any) -> Callable[..., Optimizer]:
    """`OptimizerTraits.remake` of the optimizer that `make` made from `values`; "spec" is no hyperparameter."""
    own = [name for name in values if name != "spec"]

    def again(**changes: Any) -> Optimizer:
        if unknown := sorted(changes.keys() - set(own)):
            raise ValueError(f"{make.__name__} has no {unknown[0]}; its hyperparameters are {', '.join(own)}.")
        return make(**(values | changes))

    return again


def with_traits(optimizer: Optimizer, **changes: Any) -> Optimizer:
    """The optimizer with these `OptimizerTraits` replaced."""
    return replace(optimizer, traits=replace(optimizer.traits, **changes))


def sharded_version(optimizer: Optimizer, on_full: OnFull) -> Optimizer | None:
    """The optimizer for sharded leaves; None if it supports full leaves only."""
    if optimizer.traits.elementwise:
        return optimizer
    return None if optimizer.traits.for_shards is None else optimizer.traits.for_shards(on_full)


def supports_shards(optimizer: Optimizer) -> bool:
    return optimizer.traits.elementwise or optimizer.traits.for_shards is not None


def trainable_mask(params: Tree, trainable: Tree | Callable[[Tree], Tree] | None = None) -> Tree:
    """The mask of the leaves that an optimizer trains: floating ones that `trainable` does not exclude.

    It matches by path: `params` may lack leaves of `trainable`, as one group of a partition does.

    Args:
        params: The tree of parameters.
        trainable: A tree of bools, or a function that makes it from the parameters; None: every floating leaf.

    Returns:
        The tree of bools, of the structure of `params`.

    Raises:
        ValueError: `trainable` lacks a leaf of `params`, or is None for a model with a selection bias, which has no
            gradient.
    """
    if trainable is None:
        for path in tree.flatten(params):
            if path.endswith("selection_bias"):
                raise ValueError(
                    f"{path} has no gradient, and an optimizer without a spec would apply weight decay to it: give it "
                    "spec=fnmodels.family_of(config).spec(config)."
                )
        return tree.map(lambda p: p.is_floating_point(), params)
    flat = tree.flatten(trainable(params) if callable(trainable) else trainable)
    lost = [path for path in tree.flatten(params) if path not in flat]
    if lost:
        raise ValueError(
            f"The optimizer's tree of trainable leaves (from its spec) lacks {lost[0]}, which is in params."
        )
    return with_paths(lambda path, p: bool(flat[path]) and p.is_floating_point(), params)


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Adds updates to parameters, as optax.apply_updates does.

    Args:
        params: The tree of parameters.
        updates: The updates, of `Optimizer.update`; an empty dict where a leaf has none.

    Returns:
        params + updates, each in its parameter's dtype; leaves without an update are returned unchanged.

    Raises:
        ValueError: An update has no parameter, or another shape than its parameter.
    """
    flat, leaves = tree.flatten(updates), tree.flatten(params)
    for path, update in flat.items():
        if path not in leaves:
            raise ValueError(f"There is an update of {path!r}, and no such leaf in params: {sorted(leaves)[:5]}.")
        if update.shape != (shape := leaves[path].shape):
            raise ValueError(f"The update of {path!r} is {list(update.shape)}, and the parameter is {list(shape)}.")
    return with_paths(lambda path, p: (p + flat[path]).to(p.dtype) if path in flat else p, params)


def global_norm(grads: Tree) -> Tensor:
    """The Euclidean norm over all leaves together.

    Args:
        grads: A tree of tensors.

    Returns:
        A 0-d tensor in fp32 at least; 0 for a tree without leaves.
    """
    norms = [torch.linalg.vector_norm(g, dtype=wide_dtype(g.dtype)) for g in tree.leaves(grads)]
    if not norms:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))


def list_norm(grads: Sequence[Tensor]) -> Tensor:
    """`global_norm` of a list, in one call where all are alike; not for vmap, which has no rule for it."""
    kinds = set(map(operator.attrgetter("device", "dtype"), grads))
    if len(kinds) != 1:
        return global_norm(list(grads))
    ((_, dtype),) = kinds
    return torch.linalg.vector_norm(torch.stack(list(vector_norms(grads, wide_dtype(dtype)))))


def clip_factor(norm: Tensor, limit: float | Tensor) -> Tensor:
    """The factor that scales gradients of this norm to at most `limit`, as torch.nn.utils.clip_grad_norm_ does."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def clip_by_global_norm(grads: Tree, limit: float | Tensor) -> tuple[Tree, Tensor]:
    """Scales gradients down so that their global norm is at most `limit`, as torch.nn.utils.clip_grad_norm_ does.

    Args:
        grads: A tree of gradients.
        limit: The largest norm.

    Returns:
        The scaled gradients in their dtypes, and the norm before, 0-d.

    Raises:
        ValueError: The limit is not above 0.
    """
    if not is_unknown_or(limit, lambda x: x > 0):
        raise ValueError(f"limit is {limit}; it must be above 0.")
    norm = global_norm(grads)
    factor = clip_factor(norm, limit)
    return tree.map(lambda g: (g * factor.to(wide_dtype(g.dtype))).to(g.dtype), grads), norm


def from_spec(spec: Tree | None) -> tuple[Tree | None, dict[str, bool] | None]:
    if spec is None:
        return None, None
    return tree.map(lambda leaf: leaf.trainable, spec), {path: leaf.decay for path, leaf in tree.flatten(spec).items()}


def check_rate(lr: Rate) -> None:
    if not callable(lr) and not _is_number("lr", lr, lambda x: x >= 0):
        raise ValueError(f"lr is {lr!r}; it must be a number, at least 0, or a function of the update's number.")


def is_unknown_or(number: Any, holds: Callable[[Any], Any]) -> bool:
    """Whether `holds(number)`; True for a tensor without a value to read, such as that of a transform."""
    if isinstance(number, Tensor) and (torch.compiler.is_compiling() or not has_values(number)):
        return True
    return bool(holds(number))


def _is_number(name: str, number: Any, holds: Callable[[Any], Any]) -> bool:
    """Whether it is a number or a tensor for which `holds`, as far as its value can be read.

    ValueError for a tensor of several numbers, which would be broadcast over parameters.
    """
    if isinstance(number, Tensor) and number.ndim:
        raise ValueError(f"{name} is a tensor {list(number.shape)}; it must be 0-d: torch.func.vmap maps over several.")
    return isinstance(number, (Real, Tensor)) and is_unknown_or(number, holds)


def check_betas(betas: tuple[Number, Number]) -> tuple[Number, Number]:
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not pair or not all(_is_number("a beta", beta, lambda x: 0.0 <= x < 1.0) for beta in betas):
        raise ValueError(f"betas are {betas!r}; they must be two numbers, at least 0 and below 1.")
    return betas


def check_numbers(**numbers: Number) -> None:
    for name, number in numbers.items():
        if not _is_number(name, number, lambda x: x >= 0):
            raise ValueError(f"{name} is {number!r}; it must be a number, at least 0.")


def check_below_1(**numbers: Number) -> None:
    for name, number in numbers.items():
        if not _is_number(name, number, lambda x: 0.0 <= x < 1.0):
            raise ValueError(f"{name} is {number!r}; it must be a number, at least 0 and below 1.")


def acts(number: Number) -> bool:
    """Whether a term with this factor is to be computed: always for a tensor, which a transform may vary."""
    return isinstance(number, Tensor) or bool(number)


def weight_for(number: Number, tensor: Tensor) -> Number:
    """The number as `tensor.lerp` takes it, which promotes nothing."""
    return number.to(tensor) if isinstance(number, Tensor) else number


def rate_of(lr: Rate, step: Tensor) -> Number:
    return lr(step) if callable(lr) else lr


def next_rate(lr: Rate, step: Tensor) -> Number:
    """The rate of the update after `step` updates."""
    return lr(step + 1) if callable(lr) else lr


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def first_step(params: Tree) -> Tensor:
    """Without a leaf, as a group of a partition may be on a pipeline stage, it is on the default device."""
    device = next((leaf.device for leaf in tree.leaves(params)), None)
    return torch.zeros((), dtype=torch.int64, device=device)


def with_paths(function: Callable[[str, Any], Any], params: Tree) -> Tree:
    paths = iter(tree.flatten(params))
    return tree.map(lambda leaf: function(next(paths), leaf), params)


def updates_tree(grads: Tree, flat: dict[str, Tensor]) -> Tree:
    """A tree like `grads` of the updates in `flat`, an empty dict at the paths that have none."""
    return with_paths(lambda path, _: flat.get(path, {}), grads)


def frozen_paths(trainable: Tree | None) -> frozenset[str]:
    """The paths whose gradients are not used, whatever a caller passes; trainable: a tree of bools, None: none."""
    return frozenset(path for path, trains in tree.flatten(trainable).items() if not trains)


def count_up_(step: Tensor, skip: Tensor | None) -> None:
    """step + 1 in place; unchanged where `skip` is True."""
    step.add_(1 if skip is None else (~skip).to(step.device))


def with_replaced(values: Tree, new: dict[str, Tensor]) -> Tree:
    """`values` with the leaves of `new` at their paths; others stay, such as the state of a leaf without a gradient."""
    return with_paths(lambda path, old: new.get(path, old), values)

"""The `Optimizer` type, a pair of functions over trees in the style of optax, and helpers of all optimizers.

    optimizer = train.adamw(3e-4, weight_decay=0.1, spec=family.spec(config))
    opt_state = optimizer.init(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = apply_updates(params, updates)

`update` is compatible with vmap, grad and compile; `apply_` takes a fraction of the time. A frozen leaf has None in the
moments and in `updates`, whatever `grads` has for it; a leaf with None in `grads` keeps its state and gets no update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree

Rate = float | Callable[[Tensor], "float | Tensor"]
# on_full(path, function, x): x is a shard of the matrices [.., out, in] of the leaf at `path`; returns the same shard
# of function(full matrices)
OnFull = Callable[[str, Callable[[Tensor], Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as train steps call it: one of your own is `train.Optimizer(init, update)`, two pure functions.

    def init(params): return {"sum": tree.map(torch.zeros_like, params)}
    def update(grads, opt_state, params): ...           # None in grads: a parameter that does not train
    step = train.make_step(loss_fn, train.Optimizer(init, update))

    init(params) -> opt_state, which keeps its structure through all updates.
    update(grads, opt_state, params) -> (updates, opt_state): pure; `updates` are to be added to the parameters.
    apply_(grads, opt_state, params, *, skip=None): the same in place; if the 0-d bool tensor `skip` is True, every
        tensor keeps its bits, without a wait of the host. None: the step uses `update`.
    lr(opt_state) -> the rate of the next update, for the metrics.
    trainable: a tree of bools over the parameters, or a function that makes it from them; None: every floating leaf is
        trainable.
    rates(opt_state) -> {name: rate} of its groups, if it has several.
    elementwise: whether the update of an element depends on that element, its gradient and its state alone, so that a
        shard of a leaf can be updated by itself.
    remake(**values) -> the same optimizer for the same state, with other hyperparameters (see `remake`); None: it has
        none that can be replaced.
    per_leaf: whether the update of a leaf depends on that leaf alone (elementwise implies it), so that a pipeline stage
        can update its own. An optimizer without it is refused over `pp`.
    check_paths(paths): ValueError for the paths of all leaves of a model which its patterns do not fit; None: it has no
        patterns. `init` of a pipeline stage's params does not check them.
    for_shards(on_full) -> the same optimizer for sharded leaves, if it needs functions of full matrices. An optimizer
        that has none and is not elementwise is refused for sharded parameters.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    apply_: Callable[..., None] | None = None
    lr: Callable[[Tree], float | Tensor] | None = None
    trainable: Tree | Callable[[Tree], Tree] | None = None
    rates: Callable[[Tree], dict[str, float | Tensor]] | None = None
    elementwise: bool = False
    for_shards: Callable[[OnFull], Optimizer] | None = None
    remake: Callable[..., Optimizer] | None = None
    per_leaf: bool = False
    check_paths: Callable[[Iterable[str]], None] | None = None


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
    if optimizer.remake is None:
        raise ValueError(
            f"This optimizer has no single {next(iter(values))} to replace (partition has one per group, and a custom "
            "train.Optimizer needs `remake`): assign engine.optimizer instead."
        )
    return optimizer.remake(**values)


def remaker(make: Callable[..., Optimizer], **values: Any) -> Callable[..., Optimizer]:
    """`Optimizer.remake` of the optimizer that `make` made from `values`, of which "spec" is no hyperparameter."""
    own = [name for name in values if name != "spec"]

    def again(**changes: Any) -> Optimizer:
        if unknown := sorted(changes.keys() - set(own)):
            raise ValueError(f"{make.__name__} has no {unknown[0]}; its hyperparameters are {', '.join(own)}.")
        return make(**(values | changes))

    return again


def sharded_version(optimizer: Optimizer, on_full: OnFull) -> Optimizer | None:
    """The optimizer for sharded leaves; None if it supports full leaves only."""
    if optimizer.elementwise:
        return optimizer
    return None if optimizer.for_shards is None else optimizer.for_shards(on_full)


def supports_shards(optimizer: Optimizer) -> bool:
    return optimizer.elementwise or optimizer.for_shards is not None


def trainable_mask(params: Tree, trainable: Tree | Callable[[Tree], Tree] | None = None) -> Tree:
    """The tree of bools of which leaves of `params` are trainable: floating ones that `trainable` does not exclude.

    It matches by path: `params` may lack leaves of `trainable`, as one group of a partition does.
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
    """params + updates, each in its parameter's dtype; leaves without an update are returned unchanged."""
    flat = tree.flatten(updates)
    return with_paths(lambda path, p: (p + flat[path]).to(p.dtype) if path in flat else p, params)


def global_norm(grads: Tree) -> Tensor:
    """The Euclidean norm over all leaves together, a 0-d tensor in fp32 at least; 0 for a tree without leaves."""
    norms = [torch.linalg.vector_norm(g, dtype=wide_dtype(g.dtype)) for g in tree.leaves(grads)]
    if not norms:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """The factor that scales gradients of this norm to at most `limit`, as torch.nn.utils.clip_grad_norm_ does."""
    return (limit / (norm + 1e-6)).clamp(max=1.0)


def clip_by_global_norm(grads: Tree, limit: float) -> tuple[Tree, Tensor]:
    """(gradients scaled down so that their global norm is at most `limit`, the norm before)."""
    if not limit > 0:
        raise ValueError(f"limit is {limit}; it must be above 0.")
    norm = global_norm(grads)
    factor = clip_factor(norm, limit)
    return tree.map(lambda g: (g * factor.to(wide_dtype(g.dtype))).to(g.dtype), grads), norm


def from_spec(spec: Tree | None) -> tuple[Tree | None, dict[str, bool] | None]:
    if spec is None:
        return None, None
    return tree.map(lambda leaf: leaf.trainable, spec), {path: leaf.decay for path, leaf in tree.flatten(spec).items()}


def check_rate(lr: Rate) -> None:
    if isinstance(lr, Tensor):
        return  # an argument of a caller that differentiates or vmaps the update: its value must not be read
    if not callable(lr) and not (isinstance(lr, Real) and lr >= 0):
        raise ValueError(f"lr is {lr!r}; it must be a number, at least 0, or a function of the update's number.")


def check_betas(betas: tuple[float, float]) -> tuple[float, float]:
    pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    if not pair or not all(isinstance(beta, Real) and 0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"betas are {betas!r}; they must be two numbers, at least 0 and below 1.")
    return betas


def check_numbers(**numbers: float) -> None:
    for name, number in numbers.items():
        if not (isinstance(number, Real) and number >= 0):
            raise ValueError(f"{name} is {number!r}; it must be a number, at least 0.")


def check_below_1(**numbers: float) -> None:
    for name, number in numbers.items():
        if not (isinstance(number, Real) and 0.0 <= number < 1.0):
            raise ValueError(f"{name} is {number!r}; it must be a number, at least 0 and below 1.")


def rate_of(lr: Rate, step: Tensor) -> float | Tensor:
    return lr(step) if callable(lr) else lr


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
    """A tree like `grads` of the updates in `flat`, None at the paths that have none."""
    return with_paths(lambda path, _: flat.get(path), grads)


def trainable_only(grads: Tree, trainable: Tree | None) -> Tree:
    """The gradients with None at frozen leaves, for which a caller may pass gradients that are not used."""
    if trainable is None:
        return grads
    flat = tree.flatten(trainable)
    return with_paths(lambda path, grad: grad if flat[path] else None, grads)


def with_replaced(values: Tree, new: dict[str, Tensor]) -> Tree:
    """`values` with the leaves of `new` at their paths; others stay, such as the state of a leaf without a gradient."""
    return with_paths(lambda path, old: new.get(path, old), values)

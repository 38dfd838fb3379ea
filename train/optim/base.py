"""What an optimizer is: a pair of functions over trees, in the shape of optax.

    optimizer = train.adamw(3e-4, weight_decay=0.1, spec=family.spec(config))
    opt_state = optimizer.init(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = apply_updates(params, updates)

`update` is written in plain tensor operations: pure, and fit for vmap, grad and compile. `apply_` is the same step with
torch's fused kernels, writing parameters and state in place, at a fraction of the time. A frozen leaf has None in the
moments and in `updates`, whatever `grads` has for it; a leaf with None in `grads` keeps its state and gets no update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree

Rate = float | Callable[[Tensor], "float | Tensor"]
# whole(path, function, x): of function(the matrices [.., out, in] of the leaf at path) the part that x is of them
Whole = Callable[[str, Callable[[Tensor], Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Optimizer:
    """What a train step needs of an optimizer.

    init(params) -> opt_state, which keeps its structure through all updates
    update(grads, opt_state, params) -> (updates, opt_state): pure; `updates` are to be added to the parameters.
    apply_(grads, opt_state, params, *, skip=None): the same in place; where the 0-d bool tensor `skip` is True every
        tensor keeps its bits, without the host having to wait for it. None: the step uses `update`.
    lr(opt_state) -> the rate of the update that comes next, for the metrics.
    trainable: a tree of bools over the parameters, or a function that makes it from them; None: every floating leaf
        trains.
    rates(opt_state) -> {name: rate} of its groups, where it has several.
    elementwise: whether a number's update depends on that number, its gradient and its state alone, so that a part of a
        leaf is updated as it would be in the whole.
    of_parts(whole) -> the same optimizer of parts of leaves, where it needs functions of whole matrices; what has none
        and is not elementwise takes no divided parameters.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree], tuple[Tree, Tree]]
    apply_: Callable[..., None] | None = None
    lr: Callable[[Tree], float | Tensor] | None = None
    trainable: Tree | Callable[[Tree], Tree] | None = None
    rates: Callable[[Tree], dict[str, float | Tensor]] | None = None
    elementwise: bool = False
    of_parts: Callable[[Whole], Optimizer] | None = None


def on_parts(optimizer: Optimizer, whole: Whole) -> Optimizer | None:
    """The optimizer for parts of leaves; None where it takes whole ones alone."""
    if optimizer.elementwise:
        return optimizer
    return None if optimizer.of_parts is None else optimizer.of_parts(whole)


def takes_parts(optimizer: Optimizer) -> bool:
    return optimizer.elementwise or optimizer.of_parts is not None


def trainable_mask(params: Tree, trainable: Tree | Callable[[Tree], Tree] | None = None) -> Tree:
    """The tree of bools that says which leaves of `params` train: floating ones that `trainable` does not exclude.

    By path: `params` may lack leaves of `trainable`, as one group's share of them does.
    """
    if trainable is None:
        for path in tree.flatten(params):
            if path.endswith("selection_bias"):
                raise ValueError(
                    f"No gradient teaches {path}, and an optimizer without a spec would let it decay: give it "
                    "spec=fnmodels.family_of(config).spec(config)."
                )
        return tree.map(lambda p: p.is_floating_point(), params)
    flat = tree.flatten(trainable(params) if callable(trainable) else trainable)
    lost = [path for path in tree.flatten(params) if path not in flat]
    if lost:
        raise ValueError(f"The optimizer's tree of what trains (from its spec) lacks {lost[0]}, which is in params.")
    return with_paths(lambda path, p: bool(flat[path]) and p.is_floating_point(), params)


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """params + updates, each in its parameter's dtype; leaves without an update are passed on as they are."""
    flat = tree.flatten(updates)
    return with_paths(lambda path, p: (p + flat[path]).to(p.dtype) if path in flat else p, params)


def global_norm(grads: Tree) -> Tensor:
    """The Euclidean norm over all leaves together, a 0-d tensor in fp32 at least; 0 for a tree without leaves."""
    norms = [torch.linalg.vector_norm(g, dtype=wide_dtype(g.dtype)) for g in tree.leaves(grads)]
    if not norms:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))


def clip_factor(norm: Tensor, limit: float) -> Tensor:
    """What brings gradients of this global norm to at most `limit`; torch.nn.utils.clip_grad_norm_'s formula."""
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
        return  # a parameter of whoever differentiates or vmaps the update: its value is not for reading
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


def rate_at(lr: Rate, step: Tensor) -> float | Tensor:
    return lr(step) if callable(lr) else lr


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def first_step(params: Tree) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=next(iter(tree.leaves(params))).device)


def with_paths(function: Callable[[str, Any], Any], params: Tree) -> Tree:
    paths = iter(tree.flatten(params))
    return tree.map(lambda leaf: function(next(paths), leaf), params)


def like(grads: Tree, flat: dict[str, Tensor]) -> Tree:
    """The updates as a tree, with None where a gradient makes none."""
    return with_paths(lambda path, _: flat.get(path), grads)


def of_learning(grads: Tree, trainable: Tree | None) -> Tree:
    """The gradients without those of frozen leaves, which a caller may have: they teach nothing."""
    if trainable is None:
        return grads
    flat = tree.flatten(trainable)
    return with_paths(lambda path, grad: grad if flat[path] else None, grads)


def renewed(values: Tree, new: dict[str, Tensor]) -> Tree:
    """The tree with the leaves of `new` at their paths; others stay, as the state of a leaf that got no gradient."""
    return with_paths(lambda path, old: new.get(path, old), values)

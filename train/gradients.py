"""Gradients of sums: what the parts of a batch add up to, before anything is divided or updated.

    sums_of = gradient_sums(functools.partial(next_token_loss, config=config), optimizer)
    sums = sums_of(params, microbatches)                       # total, count, aux, gradients
    sums = sums_of(params, more, sums)                         # added to those, which are used up

It is built on `torch.autograd.grad` over detached leaves, so that nothing is left behind in `.grad`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fnmodels import tree
from fnmodels.tree import Tree
from train.optim.base import Optimizer, trainable_mask

from .loss_call import Batch, caller
from .loss_call import LossFn as LossFn


@dataclass
class Sums:
    """What the parts of a batch add up to. grads: for the leaves that train, which nothing else refers to.

    divided: the gradients are those of total / count already. unreached: the paths of leaves that train, but that no
    part's loss depends on; over a mesh none are known.
    """

    total: Tensor
    count: Tensor
    aux: Tree
    grads: list[Tensor]
    divided: bool
    unreached: frozenset[str] = frozenset()


def gradient_sums(
    loss_fn: LossFn, optimizer: Optimizer, *, remat: str = "none", compile: str = "none", counts: bool = False
) -> Callable[..., Sums]:
    """sums(params, parts, into=None) -> Sums of a list of batches, added to `into` where it is given (and used up).

    Arguments as in `make_step`. counts: ask the loss function for its aux. Gradients are summed in fp32 at least. One
    part alone is divided on the way.
    """
    call = caller(loss_fn, remat=remat, compile=compile, counts=counts)

    def sums(params: Tree, parts: Sequence[Batch], into: Sums | None = None, *, divide: bool = True) -> Sums:
        train = trainable_mask(params, optimizer.trainable)
        lone = divide and into is None and len(parts) == 1
        for part in parts:
            total, count, aux, grads, unreached = _gradients(call, params, train, part, divide=lone)
            if into is None:
                wide = grads if lone else [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
                into = Sums(total, count, aux, wide, lone, unreached)
                continue
            into.total, into.count = into.total + total, into.count + count
            into.aux, into.unreached = joined(into.aux, aux), into.unreached & unreached
            for held, grad in zip(into.grads, grads, strict=True):
                held.add_(grad)
            del grads  # before the next part makes its own
        assert into is not None
        return into

    return sums


def joined(held: Tree, found: Tree) -> Tree:
    """The sum of two trees of sums. What one of them alone has a name for stays as it is; None is nothing."""
    if held is None or found is None:
        return found if held is None else held
    if isinstance(held, dict) and isinstance(found, dict):
        return held | found | {name: joined(held[name], found[name]) for name in held.keys() & found.keys()}
    return tree.map(torch.add, held, found)


def _gradients(
    call: Callable[[Tree, Batch], Any], params: Tree, train: Tree, batch: Batch, *, divide: bool
) -> tuple[Tensor, Tensor, Tree, list[Tensor], frozenset[str]]:
    """(sum, count, aux, gradients for the leaves that train, which nothing else refers to, `Sums.unreached`).

    divide: gradients of sum / count rather than of the sum; dividing on the way in saves a pass over all of them.
    """
    leaves: list[Tensor] = []

    def leaf(param: Tensor, trains: bool) -> Tensor:
        fresh = param.detach()
        if trains:
            leaves.append(fresh.requires_grad_())
        return fresh

    given = tree.map(leaf, params, train)
    if not leaves:
        raise ValueError("No leaf trains: params need a floating leaf that the optimizer's spec does not freeze.")
    total, count, *aux = checked_loss(call(given, batch))
    scale = 1 / valid_count(total, count).to(total.dtype) if divide else None
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if total.requires_grad:
        found = torch.autograd.grad(total, leaves, scale, allow_unused=True)
    if all(grad is None for grad in found) and count > 0:  # of a part without tokens a loss may be a plain 0
        raise ValueError(
            "The loss does not depend on any leaf that trains: it must be computed from the params that the loss "
            "function is given, without no_grad or detach."
        )
    paths = [path for path, trains in tree.flatten(train).items() if trains]
    unreached = frozenset(path for path, grad in zip(paths, found, strict=True) if grad is None)
    grads = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(leaves, found, strict=True)]
    taken = {t.untyped_storage().data_ptr() for t in (*leaves, *tree.leaves(batch)) if isinstance(t, Tensor)}
    sums = tree.map(Tensor.detach, aux[0]) if aux else None
    return total.detach(), count.detach(), sums, _own(grads, taken), unreached


def _own(grads: list[Tensor], taken: set[int]) -> list[Tensor]:
    """The gradients, copied where writing into one would show elsewhere: autograd hands out views and shared ones."""
    owned = []
    for grad in grads:
        where = grad.untyped_storage().data_ptr()
        private = where not in taken and grad.is_contiguous()
        owned.append(grad if private else grad.clone(memory_format=torch.contiguous_format))
        taken.add(where)
    return owned


def checked_loss(result: Any) -> tuple[Any, ...]:
    """What a loss function returned, if it is (sum, count) or (sum, count, aux)."""
    parts = result if isinstance(result, (tuple, list)) else (result,)
    if len(parts) in (2, 3) and all(isinstance(part, Tensor) and not part.ndim for part in parts[:2]):
        for path, leaf in tree.flatten(parts[2:]).items():
            if not isinstance(leaf, Tensor):
                name = path.partition(".")[2] or "itself"
                raise ValueError(
                    "The loss function's aux must be a tree of tensors, sums that add up over parts of a batch; "
                    f"{name} is a {type(leaf).__name__}."
                )
        return tuple(parts)
    kinds = [type(p).__name__ + (f" of shape {list(p.shape)}" if isinstance(p, Tensor) else "") for p in parts]
    raise ValueError(
        "The loss function must return (sum, count) or (sum, count, aux), sum and count 0-d tensors; "
        f"it returned {', '.join(kinds)}."
    )


def valid_count(total: Tensor, count: Tensor) -> Tensor:
    """The count as a divisor: 1 for 0, so that nothing over nothing is 0."""
    return count.masked_fill(count == 0, 1).to(torch.promote_types(total.dtype, torch.float32))


def totals(call: Callable[[Tree, Batch], Any], params: Tree, parts: Sequence[Batch]) -> tuple[Any, ...]:
    """(sum, count[, aux]) of all parts."""
    (total, count, *aux), *rest = (checked_loss(call(params, part)) for part in parts)
    for more, number, *others in rest:
        total, count = total + more, count + number
        aux = [joined(one, other) for one, other in itertools.zip_longest(aux, others)]
    return (total, count, *aux)


def metrics_of(total: Tensor, count: Tensor, *aux: Tree) -> dict[str, Any]:
    metrics = {"loss": total / valid_count(total, count), "total": total, "count": count}
    return metrics | ({"aux": aux[0]} if aux else {})
